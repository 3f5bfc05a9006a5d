"""Test the step from a requested to a running deployment: defaults found, early mistakes named."""

import json
import os
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import hadal.runtime.host_limits as host_limits
import hadal.runtime.resolve as resolve_module
from hadal.core.config import CacheConfig, Deployment, LedgerConfig, UnitsConfig
from hadal.core.errors import CheckpointError, ConfigError
from hadal.runtime.banner import Banner
from hadal.runtime.host_limits import available_bytes, memory_bytes, num_cores
from hadal.runtime.listener import open_listener, url_of
from hadal.runtime.process.process import Run, read_run, write_run
from hadal.runtime.process.status import ProcessStatus, Status, read_status, write_status
from hadal.runtime.resolve import deployment_file, model_folder, plan, resolve, why_not_run
from hadal.runtime.transfer import nixl
from tests.waiting import DEADLINE_S


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for path in model_folder("").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_everything_derived_is_filled_in() -> None:
    resolved = resolve(Deployment(decode=UnitsConfig(threads=1)))
    deployment = resolved.deployment
    assert Path(deployment.model).is_absolute()
    assert deployment.model_name == "hadal-tiny"
    assert (deployment.prefill.threads, deployment.decode.threads) == (num_cores(), 1)
    assert deployment.prefill.kv_blocks > 1 < deployment.decode.kv_blocks
    assert resolve(deployment).deployment == deployment


def test_drafts_need_a_module_in_the_files(model: Path) -> None:
    """Without the module "auto" uses no drafts, and a number is an error."""

    def with_drafts(drafts: int | str) -> Deployment:
        return Deployment(model=str(model), decode=UnitsConfig(drafts=drafts))

    assert resolve(with_drafts(3)).deployment.decode.drafts == 3
    assert resolve(with_drafts("auto")).deployment.decode.drafts == "auto"
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        path.unlink()
        others = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(f"model.layers.{num_layers}.")
        }
        save_file(others, path, metadata={"format": "pt"})
    off = resolve(with_drafts("auto"))
    assert off.deployment.decode.drafts == 0
    assert any("no drafts are made" in warning for warning in off.memory.warnings)
    without = resolve(with_drafts(0))
    assert without.deployment.decode.drafts == 0
    assert not any("drafts" in warning for warning in without.memory.warnings)
    with pytest.raises(ConfigError, match=rf"no MTP module.*model\.layers\.{num_layers}\.enorm"):
        resolve(with_drafts(2))


def test_prefill_makes_no_drafts() -> None:
    with pytest.raises(ConfigError, match=r"decode\.drafts"):
        Deployment(prefill=UnitsConfig(drafts=1))
    with pytest.raises(ConfigError, match=r"decode\.tenant_promise"):
        Deployment(prefill=UnitsConfig(tenant_promise=3.0))
    for wrong in (4, -1, "some"):
        with pytest.raises(ConfigError, match="drafts"):
            UnitsConfig(drafts=wrong)


def test_a_deployment_that_ships_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = deployment_file(Path("laptop_ep"))
    assert (shipped.name, shipped.is_file()) == ("laptop_ep.toml", True)
    for other in (Path("mine"), Path("configs/laptop_ep"), Path("../laptop_ep"), shipped):
        assert deployment_file(other) == other
    Path("laptop_ep").touch()
    assert deployment_file(Path("laptop_ep")) == Path("laptop_ep"), "one's own goes first"


def test_the_ledger_is_found_and_its_prices_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert plan(Deployment()).deployment.ledger.url == "off", "as $HADAL_LEDGER says in tests"
    monkeypatch.setenv("HADAL_LEDGER", str(tmp_path / "l.sqlite"))
    resolved = plan(Deployment())
    assert resolved.deployment.ledger.url == f"sqlite:///{tmp_path}/l.sqlite"
    assert plan(resolved.deployment).deployment == resolved.deployment
    assert list(tmp_path.iterdir()) == []
    for ledger, words in (
        (LedgerConfig(prices="cheap"), "ledger: 'cheap' is not a price list"),
        (LedgerConfig(url="mysql://h/d"), "not in mysql"),
        (LedgerConfig(gpu_hour_usd=0.12345678), "at most 6 decimals"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(Deployment(ledger=ledger))


def test_a_password_in_the_ledgers_url_is_for_this_user_alone(tmp_path: Path) -> None:
    deployment = Deployment(ledger=LedgerConfig(url="postgresql://me:secret@host/name"))
    write_run(tmp_path, Run("id", deployment, "info"))
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert read_run(tmp_path).deployment == deployment


def test_the_variable_names_a_model_and_an_option_goes_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADAL_MODEL", str(model))
    assert model_folder("") == model
    assert model_folder(str(model.parent)) == model.parent


@pytest.mark.parametrize("group", ["0::/", "0::/system.slice/hadal.service", "0::/gone/from/here"])
@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 0), ("max 100000", 0)],
)
def test_a_containers_share_of_time_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int, group: str
) -> None:
    """`cores` 0: all cores of the process."""
    groups(tmp_path, monkeypatch, group)
    (tmp_path / "cpu.max").write_text(text)
    assert num_cores() == (cores or len(os.sched_getaffinity(0)))


def groups(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: str) -> None:
    """Use this folder for control groups, and these as the process's own."""
    monkeypatch.setattr(host_limits, "_GROUPS", folder)
    monkeypatch.setattr(host_limits, "_OWN_GROUPS", folder / "own")
    (folder / "own").write_text("\n".join(own) + "\n")


def test_memory_is_as_much_as_the_closest_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a version 2 group below another group, and version 1 with a folder per controller."""
    groups(tmp_path, monkeypatch, "0::/slice/unit", "4:memory:/pod/one", "2:cpu,cpuacct:/pod")
    inner, pod, time = (tmp_path / name for name in ("slice/unit", "memory/pod", "cpu,cpuacct/pod"))
    for folder in (inner, pod, time):
        folder.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{3 << 30}\n")
    assert memory_bytes() == 3 << 30
    (pod / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    assert memory_bytes() == 2 << 30
    assert (available_bytes() or 0) <= 2 << 30
    (time / "cpu.cfs_quota_us").write_text("-1\n")
    (time / "cpu.cfs_period_us").write_text("100000\n")
    assert num_cores() == len(os.sched_getaffinity(0))
    (time / "cpu.cfs_quota_us").write_text("100000\n")
    assert num_cores() == 1


@pytest.mark.promise("without one everything runs in plain torch, slower")
@pytest.mark.needs("compiler")
def test_without_a_compiler_weights_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels = plan(Deployment())
    monkeypatch.setenv("CXX", "no-such-compiler")
    without = plan(Deployment())
    assert without.memory.weight_bytes > with_kernels.memory.weight_bytes


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/such"):
        resolve(Deployment(model=str(tmp_path / "no/such")))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00003.safetensors"]
)
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    for path in model.glob("*.safetensors") if name.endswith("safetensors") else [model / name]:
        path.unlink()
    with pytest.raises(
        CheckpointError, match=name.partition("-")[0].replace("model", "safetensors")
    ):
        resolve(Deployment(model=str(model)))


def test_too_little_shared_memory_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="kv_memory_mb"):
        resolve(Deployment(prefill=UnitsConfig(kv_memory_mb=1 << 30)))


@pytest.mark.promise(
    "A deployment that does not fit is refused before anything is loaded, and the "
    "error says what would make it fit."
)
@pytest.mark.parametrize(
    ("there_bytes", "remedy"),
    [(100_000_000, r"Lower prefill\.kv_memory_mb"), (10_000_000, "not fit even without KV")],
)
@pytest.mark.needs("compiler")
def test_more_than_the_machine_has_is_refused_with_what_would_fit(
    there_bytes: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve_module, "memory_bytes", lambda: there_bytes)
    with pytest.raises(ConfigError, match=rf"weights .* MB, KV .*{remedy}"):
        resolve(Deployment())


def test_an_instruction_set_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAL_KERNELS", "AVX2")
    with pytest.raises(ConfigError, match="'AVX2'; it may be one of plain, best, amx"):
        resolve(Deployment())


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: 1 << 20)
    assert "lack of memory" in resolve(Deployment()).memory.warnings[-1]


def test_nixl_that_is_asked_for_and_not_there_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "_PACKAGES", ())
    resolve(Deployment(handover="auto"))
    with pytest.raises(ConfigError, match="pip install"):
        resolve(Deployment(handover="nixl"))


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = Run("r1", resolve(Deployment()).deployment, "debug")
    write_run(tmp_path, run)
    assert read_run(tmp_path) == run
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_run(tmp_path)


def test_a_port_in_use_is_named() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(listener, "0.0.0.0") == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"port {port} .* in use"):
            open_listener("127.0.0.1", port)
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        open_listener("203.0.113.1", 0)
    with pytest.raises(ConfigError, match="not an address"):
        open_listener("no such host", 0)


def make_status() -> Status:
    processes = {"decode-0": ProcessStatus("decode", "starting", 77, 1)}
    return Status("http://127.0.0.1:1", "r", 1, False, False, 0.5, processes)


def test_a_status_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, make_status())
    assert read_status(tmp_path) == make_status()


def test_the_banner_tells_what_runs() -> None:
    banner = Banner(
        resolve(Deployment(decode=UnitsConfig(threads=1, max_requests=17))), needs_key=True
    )
    rows = "\n".join(f"{name}: {text}" for name, text in banner.rows(make_status()))
    assert "decode-0: pid 77, 1 thread, up to 17 requests" in rows
    assert "256 experts, 8 per token" in rows
    assert "needs an API key" in rows
    curl = banner.curl("http://127.0.0.1:1")
    assert "http://127.0.0.1:1/v1/chat/completions" in curl
    assert "Bearer YOUR_KEY" in curl


@pytest.mark.parametrize(
    ("host", "needs_key", "said"),
    [
        ("0.0.0.0", False, "may use and operate it"),
        ("0.0.0.0", True, "/health and /metrics need no API key"),
        ("127.0.0.1", False, ""),
    ],
)
def test_the_banner_tells_who_may_ask(host: str, needs_key: bool, said: str) -> None:
    banner = Banner(resolve(Deployment(host=host)), needs_key=needs_key)
    texts = [text for _, text in banner.rows(make_status())]
    assert any(said in text for text in texts)
    assert any("operate" in text or "need no API key" in text for text in texts) is bool(said)


GPU_BYTES = 2 * 10**9


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "asked", "transport"),
    [
        (0, 2, "auto", "nccl"),
        (2, 2, "auto", "nccl"),
        (1, 2, "auto", "gloo"),
        (1, 1, "auto", "nccl"),
        (2, 2, "gloo", "gloo"),
    ],
)
def test_ranks_that_share_a_gpu_meet_over_gloo(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, ranks: int, asked: str, transport: str
) -> None:
    monkeypatch.setattr(resolve_module, "gpus", lambda: (GPU_BYTES,) * num_gpus)
    resolved = plan(Deployment(device="cuda", transport=asked, decode=UnitsConfig(ranks=ranks)))
    assert resolved.deployment.transport == transport
    assert bool(why_not_run(resolved)) == (num_gpus == 0)


def test_ranks_that_do_not_fit_a_gpu_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "gpus", lambda: (GPU_BYTES,))
    units = UnitsConfig(ranks=4, kv_memory_mb=256)
    (reason,) = why_not_run(plan(Deployment(device="cuda", prefill=units, decode=units)))
    assert "the ranks on GPU 0 need" in reason
    assert "FP32" in reason


def test_the_fingerprint_is_worked_out_whether_blocks_are_named_or_not() -> None:
    found = resolve(Deployment(device="cpu")).fingerprint
    assert len(found) == 32
    off = resolve(Deployment(device="cpu", cache=CacheConfig(memory="off")))
    assert off.fingerprint == found
