"""The model folder that the gateway's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.gateway.api.fields import log_once
from hadal.gateway.desk.service import ServedModel, read_served_model
from hadal.gateway.text.formats import Formats

from .model_folder import write_model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def model(folder: Path) -> ServedModel:
    return read_served_model(folder, "small")


@pytest.fixture(scope="session")
def formats() -> Iterator[Formats]:
    made = Formats(log_once)
    yield made
    made.close()
