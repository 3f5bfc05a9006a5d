"""Test that a fingerprint changes with all that KV depends on besides its text, and nothing else."""

import json
import shutil
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hadal.core.config import Deployment
from hadal.core.errors import CheckpointError
from hadal.core.model_config import read_model_config
from hadal.runtime import fingerprint as module
from hadal.runtime.fingerprint import digest_of_model, fingerprint_of

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "hadal-tiny"
NUM_TENSORS = 40
TENSOR = 16384


def model(folder: Path, *, seed: int = 1, scale: float = 1.0) -> Path:
    """Make a folder with the shipped model's configuration and one safetensors file."""
    folder.mkdir()
    shutil.copy(SHIPPED / "config.json", folder)
    weights = (
        np.random.default_rng(seed).standard_normal((NUM_TENSORS, TENSOR // 4), dtype=np.float32)
        * scale
    )
    header = json.dumps(
        {
            f"layer.{i}": {
                "dtype": "F32",
                "shape": [TENSOR // 4],
                "data_offsets": [i * TENSOR, (i + 1) * TENSOR],
            }
            for i in range(NUM_TENSORS)
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + weights.tobytes()
    )
    return folder


def of(folder: Path, dtype: str = "float32", **fields: object) -> str:
    deployment = msgspec.structs.replace(Deployment(model=str(folder), device="cpu"), **fields)  # type: ignore[arg-type]
    digest = digest_of_model(folder)
    return fingerprint_of(deployment, read_model_config(folder), dtype, digest)


@pytest.fixture(params=["whole", "sampled"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "sampled":
        monkeypatch.setattr(module, "WHOLE_BYTES", 1000)


@pytest.mark.usefixtures("_either_way")
def test_a_copy_has_the_same_and_a_fine_tune_another(tmp_path: Path) -> None:
    first = of(model(tmp_path / "a"))
    assert len(first) == 2 * module.FINGERPRINT_BYTES
    assert of(model(tmp_path / "b")) == first
    assert of(model(tmp_path / "c", scale=1.0001)) != first
    assert of(model(tmp_path / "d", seed=2)) != first


@pytest.mark.usefixtures("_either_way")
def test_each_thing_that_kv_depends_on_changes_it(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    seen = {
        of(folder),
        of(folder, dtype="bfloat16"),
        of(folder, dispatch_format="fp8"),
        of(folder, device="cuda"),
    }
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    seen.add(of(folder))
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"rms_norm_eps": 1e-5}))
    seen.add(of(folder))
    with (folder / "other.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.add(of(folder))
    assert len(seen) == 7


@pytest.mark.needs("compiler")
def test_what_computes_it_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor's kernels and plain torch round differently; no compiler: plain torch runs."""
    folder = model(tmp_path / "a")
    before = of(folder, device="cpu")
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "no-such-compiler")
        without = of(folder, device="cpu")
        patched.setenv("HADAL_KERNELS", "plain")
        assert of(folder, device="cpu") == without != before
    monkeypatch.setattr(module, "cpu_kind", lambda: "x86_64 avx2")
    assert of(folder, device="cpu") not in (before, without)


def test_what_kv_does_not_depend_on_leaves_it(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    assert of(folder) == of(folder, port=1, model_name="x", chunk_tokens=64)


def test_one_changed_tensor_of_few_is_noticed_in_a_sampled_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    folder = model(tmp_path / "a")
    before, path = of(folder), folder / "model.safetensors"
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    at = len(data) - 7 * TENSOR
    data[at : at + TENSOR] ^= 1
    path.write_bytes(data.tobytes())
    assert of(folder) != before


@pytest.mark.parametrize("at", range(5))
def test_any_one_changed_tensor_of_many_is_noticed_in_a_sampled_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "NUM_SAMPLES", 8)
    monkeypatch.setattr(module, "PIECE_BYTES", TENSOR // 2)
    folder = model(tmp_path / "a")
    before, path = of(folder), folder / "model.safetensors"
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    # Change half of one tensor: as little as the embeddings of a few words, or a single expert.
    begin = len(data) - (NUM_TENSORS - (at * 9) % NUM_TENSORS) * TENSOR + at % 2 * TENSOR // 2
    data[begin : begin + TENSOR // 2] ^= 1
    path.write_bytes(data.tobytes())
    assert of(folder) != before


def test_a_large_file_costs_a_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "a")
    with (folder / "model.safetensors").open("ab") as file:
        file.truncate(1 << 40)  # A terabyte, nearly all of it a hole.
    reads: list[int] = []
    pread = module.os.pread

    def counting(fd: int, count: int, offset: int) -> bytes:
        reads.append(count)
        return pread(fd, count, offset)

    monkeypatch.setattr(module.os, "pread", counting)
    of(folder)
    assert len(reads) <= module.NUM_SAMPLES + 2
    assert sum(reads) < 1 << 20


def test_without_a_model_there_is_no_digest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone"):
        digest_of_model(tmp_path / "gone")
