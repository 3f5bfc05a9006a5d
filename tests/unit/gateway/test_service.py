"""What is read of a model folder, and how limits shape a generation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hadal.core.config import LimitsConfig
from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.service import OFF_LOOP_BYTES, ServedModel, Service, Work, read_served_model

from .model_folder import CONTEXT, write_model_folder


def work_of(model: ServedModel, fields: dict[str, Any], limits: LimitsConfig | None = None) -> Work:
    service = Service(model, limits or LimitsConfig(), random_bytes=lambda num: b"\x01" * num)
    try:
        body = json.dumps({"model": "small", "prompt": "hi", **fields}).encode()
        return asyncio.run(service.completion(body, "r"))
    finally:
        service.close()


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"top_p": 2}, "top_p is 2"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_id"),
        ("tokenizer_config.json", {}, "chat_template is missing"),
        ("config.json", {"model_type": "other"}, "model_type is 'other'"),
    ],
)
def test_damaged_folders(tmp_path: Path, name: str, content: dict[str, Any], error: str) -> None:
    write_model_folder(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=error) as caught:
        read_served_model(tmp_path, "m")
    assert name in str(caught.value)


def test_folder_without_generation_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    model = read_served_model(tmp_path, "m")
    assert (model.temperature, model.top_p, model.eos_ids, model.context_tokens) == (1.0, 1.0, (1,), CONTEXT)


def test_greedy_model(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert read_served_model(tmp_path, "m").temperature == 0


@pytest.mark.parametrize(
    ("fields", "limits", "max_tokens"),
    [
        ({}, LimitsConfig(default_output_tokens=7), 7),
        ({"max_tokens": 9}, LimitsConfig(default_output_tokens=7), 9),
        ({"max_tokens": 10**9}, LimitsConfig(), CONTEXT - 3),
        ({}, LimitsConfig(max_output_tokens=5), 5),
        ({"prompt": [5] * (CONTEXT - 1), "max_tokens": 50}, LimitsConfig(), 1),
    ],
)
def test_max_tokens(model: ServedModel, fields: dict[str, Any], limits: LimitsConfig, max_tokens: int) -> None:
    fields = {"prompt": [5, 6, 7], **fields}
    assert work_of(model, fields, limits).choices[0].generation.max_tokens == max_tokens


def test_prompt_limit(model: ServedModel) -> None:
    limits = LimitsConfig(max_prompt_tokens=10)
    assert work_of(model, {"prompt": [5] * 10}, limits).num_prompt_tokens == 10
    for prompt in ([5] * 11, [[5], [5] * 11], "a b c d e f g h i j k l"):
        with pytest.raises(RequestError, match="at most 10 are allowed") as caught:
            work_of(model, {"prompt": prompt}, limits)
        assert caught.value.code == "context_length_exceeded"


def test_stop_ids_and_min_tokens(model: ServedModel) -> None:
    generation = work_of(model, {"stop_token_ids": [1, 9], "min_tokens": 3, "max_tokens": 5}).choices[0].generation
    assert (generation.stop_ids, generation.min_tokens) == ((1, 9), 3)
    assert work_of(model, {"ignore_eos": True}).choices[0].generation.stop_ids == ()


def test_priority_goes_along(model: ServedModel) -> None:
    priorities = [work_of(model, fields).choices[0].generation.priority
                  for fields in ({}, {"priority": None}, {"priority": 3}, {"priority": -4})]  # fmt: skip
    assert priorities == [0, 0, 3, -4]


def test_seeds(model: ServedModel) -> None:
    seeds = [choice.generation.sampling.seed for choice in work_of(model, {"n": 2}).choices]
    assert seeds == [0x0101010101010101 >> 1, (0x0101010101010101 >> 1) + 1]


def test_long_bodies_give_the_same_in_the_thread(model: ServedModel) -> None:
    short, long = work_of(model, {"user": "u"}), work_of(model, {"user": "u" * OFF_LOOP_BYTES})
    assert short.choices[0].generation == long.choices[0].generation


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"n": 9}, "n"),
    ],
)
def test_refusals(model: ServedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        work_of(model, fields)
    assert caught.value.param == param
