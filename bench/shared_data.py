"""Public data that some benchmarks read. It is not in the repository: put what you want of it into
one folder, and name that in HADAL_SHARED_DATA. Without it, what needs it is left out or takes a
drawn stand-in, and says so.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.checkpoints import ROOT

VARIABLE = "HADAL_SHARED_DATA"
EXPERT_LOADS = "expert_loads"
MOONCAKE = "mooncake_conversation.jsonl.gz"
MOONCAKE_SYNTHETIC = "mooncake_synthetic.jsonl.gz"
AZURE = "azure2023_conv.csv"
SILICON = "aic_silicon_deepseek.csv"
NAME_TO_SOURCE = {
    EXPERT_LOADS: (
        "tokens of each of 256 experts, per workload: SGLang's large-scale EP kit"
        " (SGLang-reproduce)"
    ),
    MOONCAKE: "a trace of 12,031 requests, gzipped: kvcache-ai/Mooncake, FAST25-release/traces",
    MOONCAKE_SYNTHETIC: "3,993 requests, as generated: the same folder of kvcache-ai/Mooncake",
    AZURE: "lengths of 19,366 conversations: Azure/AzurePublicDataset",
    SILICON: "measured DeepSeek serving rows: aiconfigurator-core 0.12.0",
}
"""File or folder -> what it is, and where it is published."""


def shared_data() -> Path | None:
    """The folder: what HADAL_SHARED_DATA names, else shared/data beside the checkout, if it is
    there.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if named and not folder.is_dir():
        raise SystemExit(
            f"{VARIABLE} is {named}, which is no folder. Leave it unset to do without the data."
        )
    return folder if folder.is_dir() else None


def find(name: str) -> Path | None:
    """One of NAME_TO_SOURCE, if it is there."""
    folder = shared_data()
    return folder / name if folder is not None and (folder / name).exists() else None


def why_missing(*names: str) -> str:
    """What to do about data that is not there; empty if all of it is."""
    absent = [f"{name} ({NAME_TO_SOURCE[name]})" for name in names if find(name) is None]
    if not absent:
        return ""
    return f"left out or drawn, because {VARIABLE} names no folder with " + "; ".join(absent)
