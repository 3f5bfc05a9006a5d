"""One rank of a run, as a process: `python -m bench.overlap_rank`. Questions and answers are lines of JSON.

    form    connect to the members
    device  become a virtual device (bench/overlap_device)
    model   become a rank of a real model (bench/overlap_model)
    run     run a schedule from a given time on

One process can have several devices and models, each under a name (`work`), and runs one at a time.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from bench.overlap_device import DeviceCase, VirtualRank
from bench.overlap_model import ModelCase, ModelRank
from bench.overlap_net import LINK
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.plans import Member
from hadal.runtime.process.entry import die_with

EXCHANGE_TIMEOUT_S = 30.0

Answer = dict[str, Any]


class Work(Protocol):
    """Workload that a rank can run: a virtual device or a real model."""

    def run(self, question: Answer) -> Answer:
        """Run from time `start_s` on. Return `end_s` and the measurements."""
        ...


def serve(rank: int, group: MeshGroup) -> None:
    """Answer questions until stdin ends."""
    works: dict[str, Work] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer: Answer = {}
        try:
            if question["do"] == "form":
                members = msgspec.convert(question["members"], list[Member])
                group.form(question["generation"], members)
            elif question["do"] == "device":
                works[question.get("work", "")] = VirtualRank(group, DeviceCase(**question["case"]))
            elif question["do"] == "model":
                works[question.get("work", "")] = ModelRank(group, ModelCase(**question["case"]))
            else:
                before_s, sent_before, kernel_before = (
                    time.process_time(),
                    group.bytes_sent,
                    _kernel_bytes(),
                )
                answer = works[question.get("work", "")].run(question)
                answer["cpu_s"] = time.process_time() - before_s
                answer["sent_bytes"] = group.bytes_sent - sent_before
                answer["kernel_bytes"] = _kernel_bytes() - kernel_before
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap_rank", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with(options.parent)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    group = MeshGroup(
        options.rank,
        str(options.rank),
        key=bytes(32),
        host=options.address,
        deadline_s=EXCHANGE_TIMEOUT_S,
    )
    try:
        member = Member(options.rank, group.epoch, options.address, group.port)
        _say({"member": msgspec.to_builtins(member)})
        serve(options.rank, group)
    finally:
        group.close()


def _kernel_bytes() -> int:
    """Return the bytes sent on this network namespace's link, including TCP, IP and Ethernet
    headers; 0 without a link.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            return int(counters.split()[8])
    return 0


def _say(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
