"""Reading of model folders, and the effect of limits on a generation."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hadal.core.cache import split
from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.desk.auth import PRIORITY, Tenant
from hadal.gateway.desk.salts import salt_of, salt_within
from hadal.gateway.desk.service import OFF_LOOP_BYTES, ServedModel, Service, Work, read_served_model
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.asks import SamplingDefaults
from hadal.gateway.text.formats import Formats
from hadal.gateway.text.template import ConfinedProcess
from hadal.kv.names import extend, root_of
from hadal.roles.front.names import FrontNames
from tests.waiting import DEADLINE_S, wait_for

from .model_folder import CONTEXT, write_model_folder

NAMES = FrontNames(CacheConfig(), "f0")
TENANT = Tenant(salt_of(b"key"))


def work_of(
    model: ServedModel,
    fields: dict[str, Any],
    limits: LimitsConfig | None = None,
    *,
    tenant: Tenant = TENANT,
    names: FrontNames = NAMES,
) -> Work:
    service = Service(
        model, limits or LimitsConfig(), names, random_bytes=lambda num: b"\x01" * num
    )
    fields = {"model": "small", **({} if "messages" in fields else {"prompt": "hi"}), **fields}
    prepare = service.chat if "messages" in fields else service.completion
    try:
        return asyncio.run(prepare(json.dumps(fields).encode(), "r", tenant))
    finally:
        service.close()


def names_of(model: ServedModel, fields: dict[str, Any], tenant: Tenant = TENANT) -> list[bytes]:
    return list(split(work_of(model, fields, tenant=tenant).choices[0].generation.chain))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"top_p": 2}, "top_p is 2"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id is True; a token id"),
        ("generation_config.json", {"top_k": 2.5}, "top_k is 2.5; a whole number"),
        ("generation_config.json", {"top_k": -5}, "top_k is -5"),
        ("generation_config.json", {"do_sample": "no"}, "do_sample is 'no'; true or false"),
        ("generation_config.json", ["temperature"], "must hold one JSON object"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is 3; a text"),
        ("config.json", {"model_type": "other"}, "model_type is 'other'"),
    ],
)
def test_damaged_folders(tmp_path: Path, name: str, content: Any, error: str) -> None:
    write_model_folder(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=error) as caught:
        read_served_model(tmp_path, "m")
    assert name in str(caught.value)


def test_a_model_without_a_template_completes_texts_and_refuses_chats(tmp_path: Path) -> None:
    """Base models and DeepSeek-V3.2 have no chat template."""
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model = read_served_model(tmp_path, "small")
    assert work_of(model, {"prompt": "hi"}).choices
    with pytest.raises(RequestError, match="no chat template"):
        work_of(model, {"messages": [{"role": "user", "content": "hi"}]})


def test_folder_without_generation_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    model = read_served_model(tmp_path, "m")
    assert (model.sampling, model.eos_ids, model.context_tokens) == (
        SamplingDefaults(1.0, 1.0, 0),
        (1,),
        CONTEXT,
    )


@pytest.mark.slow("transformers is imported")
@pytest.mark.parametrize("ends", [86, [1, 20, 29], [29, 20]])
def test_ids_that_end_a_reply_are_those_that_transformers_ends_with(
    tmp_path: Path, ends: int | list[int]
) -> None:
    """config.json has another id, but transformers reads only generation_config.json."""
    from transformers import GenerationConfig

    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    theirs = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    ours = read_served_model(tmp_path, "small").eos_ids
    assert list(ours) == (theirs if isinstance(theirs, list) else [theirs])


def test_greedy_model(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.6})
    )
    assert read_served_model(tmp_path, "m").sampling.temperature == 0


@pytest.mark.promise(
    "temperature, top_p, top_k and the ids that end a reply come from "
    "generation_config.json unless the request sets them"
)
@pytest.mark.parametrize(
    ("content", "sampling", "eos_ids"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, SamplingDefaults(0.6, 0.95, 20), (1,)),
        ({"temperature": None, "top_k": None, "eos_token_id": None}, SamplingDefaults(), (1,)),
        ({"top_k": -1}, SamplingDefaults(), (1,)),
        # Like GLM's file: the id that ends a text, and ids that open another role's turn.
        ({"eos_token_id": [1, 20, 29]}, SamplingDefaults(), (1, 20, 29)),
        ({"eos_token_id": [86, 500_000]}, SamplingDefaults(), (86,)),
    ],
)
def test_what_the_generation_config_says_holds_where_a_request_does_not(
    tmp_path: Path, content: dict[str, Any], sampling: SamplingDefaults, eos_ids: tuple[int, ...]
) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    model = read_served_model(tmp_path, "small")
    assert (model.sampling, model.eos_ids) == (sampling, eos_ids)
    plain = work_of(model, {}).choices[0].generation
    assert plain.stop_ids == eos_ids
    assert plain.sampling.temperature == sampling.temperature
    assert (plain.sampling.top_p, plain.sampling.top_k) == (sampling.top_p, sampling.top_k)
    asked = {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "ignore_eos": True}
    own = work_of(model, asked).choices[0].generation
    assert (own.sampling.temperature, own.sampling.top_p, own.sampling.top_k) == (1.5, 0.5, 3)
    assert own.stop_ids == ()


@pytest.mark.parametrize(
    ("fields", "limits", "max_tokens"),
    [
        ({}, LimitsConfig(default_output_tokens=7), 7),
        ({"max_tokens": 9}, LimitsConfig(default_output_tokens=7), 9),
        ({"max_tokens": CONTEXT - 3}, LimitsConfig(), CONTEXT - 3),
        ({}, LimitsConfig(max_output_tokens=5), 5),
        ({"prompt": [5] * (CONTEXT - 1)}, LimitsConfig(), 1),
    ],
)
def test_max_tokens(
    model: ServedModel, fields: dict[str, Any], limits: LimitsConfig, max_tokens: int
) -> None:
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
    generation = (
        work_of(model, {"stop_token_ids": [1, 9], "min_tokens": 3, "max_tokens": 5})
        .choices[0]
        .generation
    )
    assert (generation.stop_ids, generation.min_tokens) == ((1, 9), 3)
    assert work_of(model, {"ignore_eos": True}).choices[0].generation.stop_ids == ()


def test_priority_goes_along(model: ServedModel) -> None:
    may = Tenant(TENANT.salt, frozenset({PRIORITY}))
    priorities = [
        work_of(model, fields, tenant=may).choices[0].generation.priority
        for fields in ({}, {"priority": None}, {"priority": 3}, {"priority": -4})
    ]
    assert priorities == [0, 0, 3, -4]


def test_seeds(model: ServedModel) -> None:
    seeds = [choice.generation.sampling.seed for choice in work_of(model, {"n": 2}).choices]
    assert seeds == [0x0101010101010101 >> 1, (0x0101010101010101 >> 1) + 1]


def test_long_bodies_give_the_same_in_the_thread(model: ServedModel) -> None:
    short, long = work_of(model, {"user": "u"}), work_of(model, {"user": "u" * OFF_LOOP_BYTES})
    assert short.choices[0].generation == long.choices[0].generation


@pytest.mark.parametrize("field", ["response_format", r"response\u005fformat"])
async def test_a_schema_is_looked_at_in_the_thread(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """However the field's name is escaped, a thread does the check, which may take long."""
    threads: list[threading.Thread] = []
    text = Formats.text

    def noted(formats: Formats, *given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return text(formats, *given, **named)

    monkeypatch.setattr(Formats, "text", noted)
    service = Service(model, LimitsConfig(), NAMES)
    body = f'{{"model": "small", "prompt": "hi", "{field}": {{"type": "json_object"}}}}'
    try:
        await service.completion(body.encode(), "r", TENANT)
    finally:
        service.close()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_request_that_is_not_read_in_time_is_told(model: ServedModel) -> None:
    service = Service(model, LimitsConfig(request_timeout_s=0.05), NAMES)
    go = threading.Event()

    try:
        held = asyncio.create_task(service.off_loop(TENANT, lambda: go.wait(DEADLINE_S), 0))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=r"not processed within 0\.05 s") as caught:
            await service.off_loop(TENANT, lambda: None, 0)
        assert caught.value.status == 504
        go.set()
        with suppress(ApiError):
            await held
    finally:
        service.close()


async def test_a_template_that_hangs_holds_up_nobody_elses_request(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a template ends at the limits of its own process: tests/unit/gateway/test_template.py."""
    hangs, go = threading.Event(), threading.Event()

    def render(process: ConfinedProcess, *given: Any) -> str:
        hangs.set()
        assert go.wait(DEADLINE_S)
        return "hi"

    monkeypatch.setattr(ConfinedProcess, "render", render)
    service = Service(model, LimitsConfig(), NAMES)
    message = {"role": "user", "content": "hi"}
    body = json.dumps({"model": "small", "messages": [message]}).encode()
    try:
        asking = asyncio.create_task(service.chat(body, "r", TENANT))
        await wait_for(hangs.is_set, "the template hangs")
        for _ in range(10):
            await service.completion(b'{"model": "small", "prompt": "hi"}', "s", TENANT)
        assert not asking.done()
        go.set()
        await asking
    finally:
        go.set()
        service.close()


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


IDS = [5 + i % 400 for i in range(300)]
OTHER = Tenant(salt_of(b"another key"))


@pytest.mark.promise(
    "Only full blocks have names; a shared block is never written; a prompt's last "
    "position is always computed"
)
def test_full_blocks_are_named_under_the_tenant_s_salt(model: ServedModel) -> None:
    generation = work_of(model, {"prompt": IDS}).choices[0].generation
    assert (generation.salt, generation.num_public) == (TENANT.salt, 0)
    assert generation.chain == extend(root_of(b"f0"), b"", IDS, TENANT.salt)
    assert len(generation.chain) == 4 * 16
    off = work_of(model, {"prompt": IDS}, names=FrontNames(CacheConfig(memory="off"), "f0"))
    assert off.choices[0].generation.chain == b""


def test_choices_of_a_prompt_share_its_names_and_prompts_have_their_own(model: ServedModel) -> None:
    work = work_of(model, {"prompt": [IDS, IDS[:200], IDS[1:]], "n": 2})
    chains = [choice.generation.chain for choice in work.choices]
    assert chains[0] is chains[1], "named once"
    assert chains[0] == chains[2][:48] + chains[0][48:]
    assert chains[2] == chains[3] == chains[0][:48]
    assert not set(split(chains[4])) & set(split(chains[0]))


@pytest.mark.promise("Each API key is a tenant that shares nothing with others")
@pytest.mark.promise(
    "Equal names mean equal text from the first token on, for one model and one tenant."
)
@pytest.mark.promise(
    "cache_salt in a request (up to 256 characters, as vLLM's) keeps a tenant's own users"
    " apart as well"
)
def test_tenants_and_their_users_share_no_name(model: ServedModel) -> None:
    askers = [(TENANT, None), (OTHER, None), (TENANT, "a"), (TENANT, "b"), (OTHER, "a")]
    chains = [
        names_of(model, {"prompt": IDS, "cache_salt": salt}, tenant) for tenant, salt in askers
    ]
    assert len({name for chain in chains for name in chain}) == 4 * len(askers)
    salted = work_of(model, {"prompt": IDS, "cache_salt": "a"}).choices[0].generation
    assert salted.salt == salt_within(TENANT.salt, "a")
    assert names_of(model, {"prompt": IDS, "cache_salt": "a"}) == list(split(salted.chain)), (
        "and find their own again"
    )


@pytest.mark.promise(
    '"cache_salt": "public" shares the KV of a chat\'s leading system messages, in '
    "whole blocks, with all tenants that send the same messages and the same field"
)
@pytest.mark.parametrize("num_words", [0, 20, 100, 300])
def test_public_shares_exactly_the_full_blocks_of_the_system_messages(
    model: ServedModel, num_words: int
) -> None:
    system = {"role": "system", "content": "abc " * num_words}
    chats = {
        asker: {
            "messages": [system, {"role": "user", "content": text * 300}],
            "cache_salt": "public",
        }
        for asker, text in ((TENANT, "same "), (OTHER, "same "))
    }
    ours, theirs = (names_of(model, fields, asker) for asker, fields in chats.items())
    num_system = len(
        model.vocabulary.encode_controlled("<｜begin▁of▁sentence｜>" + "abc " * num_words)
    )
    num_shared = num_system // 64 if num_words else 0
    assert (num_words < 100) == (num_shared == 0)
    assert ours[:num_shared] == theirs[:num_shared]
    assert len(ours) == len(theirs) > num_shared
    assert not set(ours[num_shared:]) & set(theirs[num_shared:]), (
        "the same question, of two tenants"
    )
    # A request that is not public shares nothing, not even with its tenant's own public blocks.
    private = names_of(model, {**chats[TENANT], "cache_salt": None})
    assert not set(private) & set(ours[:num_shared])


def test_public_leaves_a_prompt_as_it_is(model: ServedModel) -> None:
    fields = {
        "messages": [{"role": "system", "content": "abc " * 99}, {"role": "user", "content": "hi"}]
    }
    plain, public = (work_of(model, {**fields, "cache_salt": salt}) for salt in (None, "public"))
    assert plain.choices[0].generation.prompt == public.choices[0].generation.prompt
    assert public.choices[0].generation.salt == TENANT.salt
