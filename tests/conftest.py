"""For every test: none writes into the home folder of whoever runs it."""

import os

from hadal.runtime.ledger_place import LEDGER_VARIABLE

os.environ[LEDGER_VARIABLE] = "off"  # Also for the processes that tests start; those that want a ledger say where.
