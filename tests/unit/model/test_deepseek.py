"""Parity with transformers' DeepSeek-V3 in FP32: every form of the forward pass, many shapes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.reference.forward import forward, generate, no_latents
from tests.fresh import fresh
from tests.levels import FULL, MORE
from tests.unit.model.checkpoints import Peer

TOLERANCE = 1e-4
NUM_TOKENS = 150
NUM_GREEDY = 40 if MORE else 16
STRIDE = 5 if MORE else 15
BLOCKS = (7, 3, 5)


def make_model(peer: Peer, num_blocks: int = 12, *, fused: bool = True) -> DeepseekV3:
    model = DeepseekV3(peer.weights, KvCache(peer.weights.config, num_blocks))
    # NaN in entries that were never written: results must not depend on them.
    model.cache.cache_PLSD.fill_(float("nan"))
    if not fused:
        model._has_fused_step = False
    return model


def chunk(tokens: list[int], start: int, end: int, block_ids: tuple[int, ...] = BLOCKS) -> Chunk:
    return Chunk(
        "r", tuple(tokens[start:end]), start, block_ids[: -(-end // BLOCK_TOKENS)], None, 0
    )


def random_tokens(peer: Peer, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, peer.vocab_size, (count,), generator=generator).tolist()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert theirs.std() > 0.3, "logits this flat would hide mistakes"
    return float((ours - theirs).abs().max())


def test_reference_forward(peer: Peer) -> None:
    tokens = random_tokens(peer, NUM_TOKENS)
    ours, _ = forward(peer.weights, torch.tensor(tokens), no_latents(peer.weights))
    assert difference(ours, peer.logits(tokens)) <= TOLERANCE


@pytest.mark.usefixtures("prefill_form")
def test_whole_prompt(peer: Peer) -> None:
    tokens = random_tokens(peer, NUM_TOKENS)
    theirs = peer.logits(tokens)
    model = make_model(peer)
    assert difference(model.head(model.hidden([chunk(tokens, 0, NUM_TOKENS)])), theirs) <= TOLERANCE
    assert (
        difference(make_model(peer).prefill([chunk(tokens, 0, NUM_TOKENS)])[0], theirs[-1])
        <= TOLERANCE
    )


def some_cuts() -> list[int]:
    """Return cuts: both ends, those around every block's end, and one in STRIDE from a random start."""
    ends = {1, 2, NUM_TOKENS - 2, NUM_TOKENS - 1}
    around = {
        end + offset
        for end in range(BLOCK_TOKENS, NUM_TOKENS, BLOCK_TOKENS)
        for offset in (-1, 0, 1)
    }
    return sorted(ends | around | set(range(1 + fresh().randrange(STRIDE), NUM_TOKENS, STRIDE)))


@pytest.mark.campaign("more cuts")
@pytest.mark.usefixtures("prefill_form")
def test_cut_anywhere(peer: Peer) -> None:
    tokens = random_tokens(peer, NUM_TOKENS, seed=1)
    theirs = peer.logits(tokens)
    model, ours = make_model(peer), []
    cuts = range(1, NUM_TOKENS) if FULL else some_cuts()
    for cut in cuts:
        model.cache.cache_PLSD.fill_(float("nan"))
        first = model.prefill([chunk(tokens, 0, cut)])[0]
        assert difference(first, theirs[cut - 1]) <= TOLERANCE, cut
        ours.append(model.prefill([chunk(tokens, cut, NUM_TOKENS)])[0])
    assert difference(torch.stack(ours), theirs[-1].expand(len(cuts), -1)) <= TOLERANCE


Text = tuple[list[int], torch.Tensor]
"""Tokens, and transformers' logits after each token."""


@pytest.fixture(scope="module")
def texts(peers: dict[str, Peer]) -> list[Text]:
    """Return three texts with logits. A prompt is a prefix of a text, and so are its logits."""
    wholes = [random_tokens(peers["yarn_odd"], NUM_TOKENS, seed=i) for i in range(3)]
    return [(whole, peers["yarn_odd"].logits(whole)) for whole in wholes]


@pytest.mark.slow("200 examples at `more`")
@pytest.mark.usefixtures("prefill_form")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_several_prompts_in_ragged_chunks(
    peers: dict[str, Peer], texts: list[Text], seed: int
) -> None:
    """Run steps that mix first and later chunks of three prompts; some chunks need no logits."""
    peer, rng = peers["yarn_odd"], random.Random(seed)
    prompts = [whole[: rng.randint(1, NUM_TOKENS)] for whole, _ in texts]
    theirs = [logits for _, logits in texts]
    blocks = [(1 + 3 * i, 3 + 3 * i, 2 + 3 * i) for i in range(3)]
    model, done = make_model(peer), [0, 0, 0]
    while left := [i for i in range(3) if done[i] < len(prompts[i])]:
        step = []
        for i in rng.sample(left, rng.randint(1, len(left))):
            end = rng.randint(done[i] + 1, min(done[i] + 70, len(prompts[i])))
            step.append((i, chunk(prompts[i], done[i], end, blocks[i])))
            done[i] = end
        wanted = [k for k in range(len(step)) if rng.random() < 0.7]
        logits = model.prefill([part for _, part in step], wanted)
        assert len(logits) == len(wanted)
        for row, k in enumerate(wanted):
            i, part = step[k]
            expected = theirs[i][part.start + len(part.tokens) - 1]
            assert difference(logits[row], expected) <= TOLERANCE


@pytest.mark.parametrize("fused", [True, False])
def test_token_by_token(peer: Peer, fused: bool) -> None:
    """Decode in absorbed form from token one: a batch of three requests of different lengths."""
    prompts = [random_tokens(peer, NUM_TOKENS, seed=i) for i in range(3)]
    theirs = [peer.logits(prompt) for prompt in prompts]
    model = make_model(peer, fused=fused)
    table = torch.tensor([[1, 4, 2], [3, 5, 7], [6, 9, 8]], dtype=torch.int32)
    worst = 0.0
    for step in range(NUM_TOKENS):
        positions = [step, (step + 1) // 2, step // 3]
        tokens = torch.tensor([prompt[p] for prompt, p in zip(prompts, positions, strict=True)])
        ours = model.decode(tokens, torch.tensor(positions), table)
        expected = torch.stack([logits[p] for logits, p in zip(theirs, positions, strict=True)])
        worst = max(worst, difference(ours, expected))
    assert worst <= TOLERANCE


@pytest.mark.usefixtures("prefill_form")
def test_prefill_then_decode(peer: Peer) -> None:
    tokens = random_tokens(peer, NUM_TOKENS, seed=5)
    theirs, model = peer.logits(tokens), make_model(peer)
    model.prefill([chunk(tokens, 0, 60)], [])
    for position in range(60, NUM_TOKENS):
        ours = model.decode(
            torch.tensor([tokens[position]]), torch.tensor([position]), torch.tensor([BLOCKS])
        )
        assert difference(ours[0], theirs[position]) <= TOLERANCE


@pytest.mark.campaign("more tokens")
@pytest.mark.usefixtures("prefill_form")
def test_same_greedy_tokens(peer: Peer) -> None:
    prompt = random_tokens(peer, 61, seed=9)
    theirs = peer.theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 61, dtype=torch.int64),
        max_new_tokens=NUM_GREEDY,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert generate(peer.weights, prompt, NUM_GREEDY) == theirs
    model = make_model(peer)
    ours = [int(model.prefill([chunk(prompt, 0, len(prompt))])[0].argmax())]
    while len(ours) < NUM_GREEDY:
        position = torch.tensor([len(prompt) + len(ours) - 1])
        ours.append(
            int(model.decode(torch.tensor(ours[-1:]), position, torch.tensor([BLOCKS]))[0].argmax())
        )
    assert ours == theirs


def test_decode_leaves_other_blocks_alone(plain: Peer) -> None:
    model = make_model(plain)
    model.decode(torch.tensor([3]), torch.tensor([0]), torch.tensor([[4]]))
    written = ~model.cache.cache_PLSD.isnan().all(-1)
    assert written.nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[4, 0]]
