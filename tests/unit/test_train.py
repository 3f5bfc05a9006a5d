"""Training of the MTP layer's two applications: their targets, the equality of the second one with
serving, that it learns, and when it is trained.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit import tiny_training
from train import train
from train.data import Batch, pack
from train.evaluate import acceptance
from train.model import Model, rope_table
from train.tokenizer import load_or_build, spellings
from train.train import draft_losses, main_loss

TOKENIZER = Path(__file__).parents[2] / "models" / "hadal-tiny" / "tokenizer.json"
NUM_WORDS = 11
TINY = replace(tiny_training.TINY, vocab_size=NUM_WORDS)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tiny_training.plain(monkeypatch):
        yield


def counting(*sizes: int) -> Batch:
    """Return sequences that count on from different words; the first two of each are the prompt."""
    words = [[(3 * index + i) % NUM_WORDS for i in range(size)] for index, size in enumerate(sizes)]
    return pack([(ids[:2], ids[2:]) for ids in words], [])


def gradients(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_targets_end_with_their_sequence() -> None:
    batch = pack([([5, 6], [7, 8, 9]), ([1, 2, 3], [4])], [])
    assert batch.targets.tolist() == [-100, 7, 8, 9, -100, -100, -100, 4, -100]
    assert batch.mtp_targets.tolist() == [7, 8, 9, -100, -100, -100, 4, -100, -100]
    assert batch.second_tokens.tolist() == [7, 8, 9, 0, 0, 3, 4, 0, 0]
    assert batch.second_targets.tolist() == [8, 9, -100, -100, -100, 4, -100, -100, -100]


@pytest.mark.parametrize("num_padded", [1, 2, 3])
def test_a_sequence_shorter_than_the_distance_has_no_target(num_padded: int) -> None:
    batch = pack([([5, 6], [7, 8])], [], 4 + num_padded)
    for name in ("tokens", "targets", "mtp_targets", "second_tokens", "second_targets"):
        assert len(getattr(batch, name)) == 4 + num_padded, name
    assert batch.second_targets.tolist() == [8, *[-100] * (3 + num_padded)]


def test_the_second_application_is_the_one_of_serving() -> None:
    """Compare each row's second application with the MTP layer over a chain: the first
    application's entries up to this row, then the row's own entry of its draft.
    """
    model, batch = Model(TINY), counting(7, 3, 9)
    text = (
        model.hidden(batch.tokens, batch.positions, batch.bounds),
        batch.next_tokens,
        batch.positions,
        batch.bounds,
    )
    states = model.mtp_hidden(*text)
    rows = torch.tensor([0, 2, 4, 10, 15])  # No rows of the second sequence.
    drafts = torch.tensor([4, 0, 9, 1, 1])
    got = model.mtp_second_hidden(*text, states, rows, drafts)

    embed, mtp = model.model.embed_tokens, model.mtp
    first_x = mtp.combine(embed(batch.next_tokens), text[0])
    for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        begin = batch.bounds[batch.sequence[row]]
        x = mtp.combine(embed(draft[None]), states[row][None])
        chain = torch.cat([first_x[begin : row + 1], x])
        table = rope_table(TINY, torch.arange(len(chain)))
        out = mtp(chain, table, torch.tensor([0, len(chain)]))
        expected = mtp.shared_head["norm"](out)[-1]
        torch.testing.assert_close(got[index], expected, rtol=1e-4, atol=1e-5)


def test_states_of_some_rows_are_those_of_all() -> None:
    model, batch, rows = Model(TINY), counting(9, 12), torch.tensor([2, 17, 9])
    text = (batch.tokens, batch.positions, batch.bounds)
    of_all = model.hidden(*text)[rows]
    counts = model.model.layers[-2].mlp.counts
    counts.zero_()
    torch.testing.assert_close(model.hidden(*text, rows), of_all)
    assert counts.sum() == len(rows) * TINY.num_experts_per_tok, "no others were computed"


def test_the_second_loss_reaches_the_layer_and_leaves_the_model_alone() -> None:
    model = Model(TINY)
    reached = gradients(model, draft_losses(model, counting(9, 12))[1])
    mtp = f"model.layers.{TINY.num_hidden_layers}."
    for name, gradient in reached.items():
        if name.startswith(mtp):
            assert gradient is not None, name
            assert gradient.abs().sum() > 0, name
        elif "embed_tokens" not in name and "lm_head" not in name:
            assert gradient is None or not gradient.any(), name


def interleaved() -> Batch:
    """Return two interleaved counts: the word before the last determines the next word, the last does
    not. The first application finds its target in the model's state, the second must look elsewhere.
    """
    encoded = []
    for start in range(NUM_WORDS):
        ids = [(start * (1 + 3 * (i % 2)) + i // 2) % NUM_WORDS for i in range(12)]
        encoded.append((ids[:2], ids[2:]))
    return pack(encoded, [])


def train_some(weight: float) -> tuple[list[float], float]:
    """Train some steps with this weight; return the second application's losses and the share of
    its drafts that are then accepted.
    """
    torch.manual_seed(0)
    model, batch, seen = Model(TINY), interleaved(), []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(25):
        first, second = draft_losses(model, batch)
        (main_loss(model, batch)[0] + 0.2 * (first + weight * second)).backward()
        seen.append(second.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen, acceptance(model, batch)[1]


def test_the_second_application_learns() -> None:
    seen, accepted = train_some(0.5)
    untaught, accepted_untaught = train_some(0.0)
    assert seen[-1] < 0.1 * seen[0]
    assert seen[-1] < 0.3 * untaught[-1]
    assert accepted > accepted_untaught


def test_a_second_draft_follows_the_first_draft_and_counts_only_behind_a_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = Model(TINY), counting(9, 12)
    h = model.hidden(batch.tokens, batch.positions, batch.bounds)
    states = model.mtp_hidden(h, batch.next_tokens, batch.positions, batch.bounds)
    chosen, drafts = model.lm_head(h).argmax(-1), model.lm_head(states).argmax(-1)
    rows = [row for row in range(21) if batch.mtp_targets[row] >= 0]
    right = [row for row in rows if drafts[row] == chosen[row + 1]]
    seen: list[tuple[list[int], list[int]]] = []
    real = model.mtp_second_hidden

    def spy(*arguments: torch.Tensor) -> torch.Tensor:
        seen.append((arguments[5].tolist(), arguments[6].tolist()))
        return real(*arguments)

    monkeypatch.setattr(model, "mtp_second_hidden", spy)
    first, _ = acceptance(model, batch)
    looked_at = [row for row in right if batch.second_targets[row] >= 0]
    assert first == pytest.approx(len(right) / len(rows))
    assert seen == [(looked_at, drafts[looked_at].tolist())]


@pytest.mark.parametrize(("step", "drafts"), [(10, False), (819, False), (820, True), (999, True)])
def test_the_layer_is_trained_last_and_alone(step: int, drafts: bool, tmp_path: Path) -> None:
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    settings = {"steps": 1000, "lr": 0.008, "batch_tokens": 27, "seed": 0}
    num_words = load_or_build(TOKENIZER).get_vocab_size()
    run = train.Run(tmp_path, settings, replace(TINY, vocab_size=num_words))
    run.step = step
    before = {name: p.clone() for name, p in run.model.state_dict().items()}
    found, _ = run.update(counting(9, 12))
    assert (found.main > 0, found.first > 0, found.second > 0) == (not drafts, drafts, drafts)
    mtp = f"model.layers.{TINY.num_hidden_layers}."
    changed = {
        name for name, p in run.model.state_dict().items() if not torch.equal(p, before[name])
    }
    assert {name.startswith(mtp) for name in changed} == {drafts}


def test_tokens_begin_with_how_they_are_spelled_and_the_head_names_what_it_is_given() -> None:
    tokenizer = load_or_build(TOKENIZER)
    ids = tokenizer.get_vocab()
    model = Model(replace(TINY, vocab_size=len(ids), hidden_size=192))
    model.begin_alike(spellings(tokenizer))
    embedding = model.model.embed_tokens.weight.detach()
    alike = torch.nn.functional.normalize(embedding) @ torch.nn.functional.normalize(embedding).T
    for word, same in (("Ġmorning", "morning"), ("ĠLisa", "Lisa")):
        nearest = alike[ids[word]].topk(2)[1].tolist()
        assert nearest == [ids[word], ids[same]]
    # A direction in the embedding, found with half of the words, tells which others have "n" as
    # their fourth letter.
    found = {word: token for token, (word, _, _) in enumerate(spellings(tokenizer))}
    words = [word for word in found if word.isascii() and word.isalpha() and len(word) > 4]
    random.Random(1).shuffle(words)
    vectors = embedding[[found[word] for word in words]]
    is_n = torch.tensor([word[3] == "n" for word in words])
    known, asked = slice(0, len(words) // 2), slice(len(words) // 2, None)
    reads = vectors[known][is_n[known]].mean(0) - vectors[known][~is_n[known]].mean(0)
    says = vectors[asked] @ reads
    assert says[is_n[asked]].mean() > says[~is_n[asked]].mean() + 2 * says[~is_n[asked]].std()
    assert embedding.std() == pytest.approx(0.5, rel=0.1)
    named = model.lm_head(embedding).argmax(-1)
    assert (named == torch.arange(len(ids))).float().mean() > 0.95
