"""Entry point of `python -m train`."""

import os

# Spinning OpenMP threads block each other on a busy machine: a step took ten times as long with them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from train.train import main

main()
