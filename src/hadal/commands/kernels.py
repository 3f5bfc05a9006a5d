"""`python -m hadal.commands.kernels`: compile the kernels now instead of at the first start. `make
setup` calls it.

The exit code is 0 if the kernels are compiled, or cannot be (no compiler, `HADAL_KERNELS=plain`); 1
if another try may help; and 2 for an invalid value of `HADAL_KERNELS`.
"""

from __future__ import annotations

import sys

from hadal.kernels.build import KERNELS, PLAIN, BuildError, TimedOut, build, instruction_set
from hadal.progress import Bar


def main() -> int:
    """Compile the kernels and return the exit code."""
    try:
        asked = instruction_set()
    except BuildError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    try:
        if asked == PLAIN:
            print(f"kernels: not compiled, because {KERNELS} is {PLAIN}")
            return 0
        with Bar("kernels") as bar:
            library = build(lambda elapsed_s: bar.update("compiling them for this machine, once"))
    except TimedOut as error:
        print(
            f"kernels: {error} This machine is too busy: try again when it has less to do,"
            " or set HADAL_KERNELS=plain to run without kernels, slower.",
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
