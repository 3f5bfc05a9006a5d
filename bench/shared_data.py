"""Public data that some benchmarks read. It is not in the repository: put the files you want into one folder
and name the folder in HADAL_SHARED_DATA. Without the data, a benchmark skips the part that needs it or uses
generated data instead, and prints that it did.
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
"""File or folder -> its content and where it is published."""


def shared_data() -> Path | None:
    """Return the folder: HADAL_SHARED_DATA, else shared/data beside the checkout; None if there is
    none. Raises SystemExit if HADAL_SHARED_DATA is not a folder.
    """
    named = os.environ.get(VARIABLE)
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if named and not folder.is_dir():
        raise SystemExit(
            f"{VARIABLE} is {named}, which is no folder. Leave it unset to do without the data."
        )
    return folder if folder.is_dir() else None


def find(name: str) -> Path | None:
    """Return the path of one of NAME_TO_SOURCE; None if it is missing."""
    folder = shared_data()
    return folder / name if folder is not None and (folder / name).exists() else None


def why_missing(*names: str) -> str:
    """Return which of these files are missing and where to get them, as text; "" if none."""
    absent = [f"{name} ({NAME_TO_SOURCE[name]})" for name in names if find(name) is None]
    if not absent:
        return ""
    return f"left out or drawn, because {VARIABLE} names no folder with " + "; ".join(absent)
