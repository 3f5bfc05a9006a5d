"""Decide whether two answers to one request may differ. A token is drawn by a random number: each
token has a range of cumulative probability. Recomputed logits differ in their last bits, so a
number beside the border of two ranges may fall on its other side. Where two experts score nearly
the same, the last bits choose between them, and the border itself moves by about 0.01.

    body --the gateway's own code--> the generations sent to ranks --the plain loop, exact and with NOISE-->
    logits of the common beginning --bias, penalties, mask, temperature--> the tokens within EDGE of the draw
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.messages.generation import Generation
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import Service, Work, read_served_model
from hadal.model.load import load_weights
from hadal.model.sampler import Sampler
from hadal.reference.forward import forward, no_latents
from hadal.reference.params import ModelWeights
from hadal.reference.sampling import adjust, allowed, kept, pick, uniform
from hadal.roles.front.names import FrontNames
from hadal.tokens.grammars import Grammars
from hadal.tokens.table import read_token_table

EDGE = 1e-4
"""Largest distance between a draw and a border at which either token is accepted, in cumulative
probability. Kernels and the plain loop differ by about a tenth of this.
"""
NOISE, NUM_NOISY = 1e-5, 16
"""NOISE: relative noise on inputs of experts and router, like rounding. NUM_NOISY: noisy copies of the weights."""
COMPLETIONS = "/v1/completions"


def beside_a_border(
    folder: Path, path: str, body: dict[str, Any], ours: list[Any], theirs: list[Any]
) -> bool:
    """Return whether the first two tokens that differ lie beside the draw, in each differing choice.
    False if one text is a prefix of the other.
    """
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = list(zip(one["token_ids"], other["token_ids"], strict=False))
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            if one["token_ids"] != other["token_ids"]:
                return False
            continue
        generation = _generations(folder, path, body)[number]
        if not any(
            set(pairs[at]) <= near for near in near(folder, generation, one["token_ids"][:at])
        ):
            return False
    return True


def _generations(folder: Path, path: str, body: dict[str, Any]) -> list[Generation]:
    """Return the generations that the gateway sends to ranks for a body."""

    async def begin() -> Work:
        model = read_served_model(folder, "m")
        service = Service(model, LimitsConfig(), FrontNames(CacheConfig(), "f0"))
        try:
            make = service.completion if path == COMPLETIONS else service.chat
            asked = json.dumps({"model": "m", **body}).encode()
            return await make(asked, "r", Tenant(salt_of(b"key")))
        finally:
            service.close()
            if model.chat is not None:
                model.chat.close()

    return [choice.generation for choice in asyncio.run(begin()).choices]


def near(folder: Path, generation: Generation, output: list[int]) -> Iterator[set[int]]:
    """Yield growing sets of the tokens that the draw after `output` gives if its number moves by up
    to EDGE: first with exact weights, then also with each noisy copy of the weights.
    """
    exact, found = _weights(folder), set[int]()
    for seed in range(-1, NUM_NOISY):
        weights = exact if seed < 0 else _noisy(exact, seed)
        found |= _drawn(folder, weights, generation, output)
        yield found


def _drawn(
    folder: Path, weights: ModelWeights, generation: Generation, output: list[int]
) -> set[int]:
    table = read_token_table(folder)
    ids = torch.tensor([*generation.prompt, *output])
    logits_1V = forward(weights, ids, no_latents(weights))[0][-1:]
    sampler = Sampler(
        1, logits_1V.shape[1], grammars=Grammars(lambda: table, len(table.token_bytes))
    )
    sampler.join(
        0,
        generation.sampling,
        len(output),
        prompt=generation.prompt,
        output=output,
        stop_ids=generation.stop_ids,
        min_tokens=generation.min_tokens,
    )
    slots_B, one_B = np.zeros(1, np.int64), np.ones(1, np.int64)
    masks = sampler.wait(slots_B, one_B, one_B)
    logits_1V = adjust(logits_1V, slots_B, sampler._table)
    if masks is not None:
        logits_1V = allowed(logits_1V, masks)
    slot_B = sampler._slots
    p_1V = kept(logits_1V, slot_B)
    (number,) = uniform(slot_B["seed"], slot_B["index"].astype(np.uint64)).tolist()
    shifted = (number + shift for shift in (-EDGE, 0.0, EDGE))
    return {
        int(pick(p_1V, torch.tensor([min(max(each, 0.0), 1.0)], dtype=torch.float64))[0])
        for each in shifted
    }


def _noisy(weights: ModelWeights, seed: int) -> ModelWeights:
    random = torch.Generator().manual_seed(seed)

    def moved(norm_D: torch.Tensor) -> torch.Tensor:
        return norm_D * (1 + NOISE * torch.randn(norm_D.shape, generator=random))

    layers = [replace(one, ffn_norm_D=moved(one.ffn_norm_D)) for one in weights.layers]
    return replace(weights, layers=layers)


@cache
def _weights(folder: Path) -> ModelWeights:
    return load_weights(folder)
