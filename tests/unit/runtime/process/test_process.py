"""Test the set-up that a child process does before anything else."""

import subprocess
import sys
import time

from tests.waiting import DEADLINE_S

LIMITED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from hadal.runtime.process.process import MAX_DESCRIPTORS, raise_descriptor_limit
raise_descriptor_limit()
wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
"""


def test_a_child_may_open_as_many_files_as_the_system_lets_it() -> None:
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=DEADLINE_S)


def test_steps_and_roles_read_one_clock() -> None:
    """Steps are timed by perf_counter, roles by monotonic."""
    clocks = [time.get_clock_info(name) for name in ("monotonic", "perf_counter")]
    assert clocks[0].implementation == clocks[1].implementation
