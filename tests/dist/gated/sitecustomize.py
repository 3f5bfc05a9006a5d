"""The gate (tests/dist/gate) before the steps of units on hosts: Python imports this at its start where
this folder is on PYTHONPATH. Units are forked from the process that has installed the gate.
"""

import os
import sys

if "hadal.runtime.process.forks" in sys.orig_argv:
    from tests.dist import gate

    gate.install(os.environ[gate.VARIABLE])
