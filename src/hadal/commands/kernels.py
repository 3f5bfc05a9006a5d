"""`python -m hadal.commands.kernels`: compile the kernels now, so that the first start need not.
`make setup` calls it.

It leaves with 0 where there is nothing to be done about their absence (no compiler,
`HADAL_KERNELS=plain`), with 1 where doing the same again may help, and with 2 for a word that
`HADAL_KERNELS` may not be.
"""

from __future__ import annotations

import sys

from hadal.kernels.build import KERNELS, PLAIN, BuildError, TimedOut, build, instruction_set
from hadal.progress import Bar


def main() -> int:
    """Returns the exit code."""
    try:
        asked = instruction_set()
    except BuildError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    try:
        if asked == PLAIN:
            print(f"kernels: none are compiled, for {KERNELS} is {PLAIN}")
            return 0
        with Bar("kernels") as bar:
            library = build(lambda elapsed_s: bar.update("compiling them for this machine, once"))
    except TimedOut as error:
        print(
            f"kernels: {error} This machine gives it too little of a core: try again when there is"
            " less to do. HADAL_KERNELS=plain does without them, slower.",
            file=sys.stderr,
        )
        return 1
    except BuildError as error:
        print(f"kernels: {error} Hadal runs without them, slower.")
        return 0
    print(f"kernels: {library.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
