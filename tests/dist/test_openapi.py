"""A running server against its own description: schemathesis draws valid and invalid requests from
/openapi.json and checks the replies.

A body that the description allows may still be refused, by name: no schema expresses rules between
fields, such as "top_logprobs needs logprobs".
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.openapi_hooks import MODEL
from tests.dist.serving import StartServer, blocks_used, metric
from tests.levels import FULL
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "use_after_free",
    "ignored_auth",
    "read_by_its_client",
)
NUM_EXAMPLES, PHASES = (200, "coverage,fuzzing,stateful") if FULL else (2, "coverage,fuzzing")
TIMEOUT_S = 3000 if FULL else 900


@pytest.mark.promise(
    "GET /openapi.json describes every endpoint (OpenAPI 3.1), generated from the "
    "structs that parse bodies"
)
@pytest.mark.more("schemathesis asks a thousand times")
@pytest.mark.slow("schemathesis starts, and asks a thousand times")
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("has_keys", [False, True] if FULL else [True])
def test_what_is_served_is_what_is_described(
    start_server: StartServer, tmp_path: Path, has_keys: bool
) -> None:
    arguments = ("--api-key", "k") if has_keys else ()
    batches = {"url": str(tmp_path / "batches.sqlite"), "max_file_mb": 1}
    server = start_server(*arguments, limits={"default_output_tokens": 4}, batches=batches)
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run"),
        f"{server.url}/openapi.json",
        *("--checks", ",".join(CHECKS), "--phases", PHASES),
        *("--max-examples", str(NUM_EXAMPLES), "--request-timeout", "180"),
        # /trace waits for steps: on an idle unit it replies 504 after a while.
        *("--exclude-path", "/trace"),
        *("--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"),
        *("--no-color", "--generation-database", "none"),
        *(() if FULL else ("--seed", "1")),
        *(("--header", "Authorization: Bearer k") if has_keys else ()),
    ]
    model = "hadal-tiny"
    environment = {**os.environ, MODEL: model, "SCHEMATHESIS_HOOKS": "tests.dist.openapi_hooks"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    ran = subprocess.run(
        command,
        cwd=tmp_path,  # It writes a folder of its own there.
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(ran.stdout[-20_000:], ran.stderr[-2000:])
    assert ran.returncode == 0
    for name in ("chat", "completions", "messages", "responses"):
        answered = f'endpoint="{name}",status="200"'
        assert metric(server, "hadal_requests_total", answered) > 0, "some were good"
    if not has_keys:
        wait_until(lambda: blocks_used(server) == 0, "nothing is left of it")
