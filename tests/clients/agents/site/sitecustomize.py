"""The scripted model in a server's units: Python imports this at its start where this folder is on
PYTHONPATH. Units are forked from the process that has installed the model.
"""

import sys

if "hadal.runtime.process.forks" in sys.orig_argv:
    from tests.clients.agents import scripted

    scripted.install()
