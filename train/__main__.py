"""`python -m train`."""

from train.train import main

main()
