"""Entry point of `python -m train`."""

import os

# Threads that spin while waiting block each other on a busy machine: a step took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from train.train import main

main()
