"""Measure a published folder: greedy answers to held-out questions, MTP acceptance, and expert
load.

`python -m train.evaluate --model models/hadal-tiny --count 100` asks 100 questions of every task of
plain chats (evals.tasks.TASKS).
The weights are the published ones, dequantised; the arithmetic is FP32.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from evals.tasks import TASKS, Example, is_correct, sample_split
from train.data import Batch, encode, pack, render_prompt
from train.export import load
from train.model import Layer, Model, MoE, rope_table

EOS_ID = 1


class _Cache:
    """Expanded keys and values of a batch of sequences, [B, L, H, *] per layer."""

    def __init__(self, model: Model, prompts: list[list[int]], num_new: int) -> None:
        c = model.c
        self.lengths = torch.tensor([len(p) for p in prompts])
        shape = (len(prompts), int(self.lengths.max()) + num_new, c.num_attention_heads)
        self.k = [
            torch.zeros(*shape, c.qk_nope_head_dim + c.qk_rope_head_dim)
            for _ in range(c.num_hidden_layers)
        ]
        self.v = [torch.zeros(*shape, c.v_head_dim) for _ in range(c.num_hidden_layers)]


def _attend(
    layer: Layer, x: Tensor, table: Tensor, cache: _Cache, index: int, rows: Tensor, at: Tensor
) -> Tensor:
    """Compute attention of one new token per sequence; write its key and value into the cache."""
    attention = layer.self_attn
    q = attention.queries(x, table)
    k, v = attention.expand(*attention.latents(x, table))
    cache.k[index][rows, at], cache.v[index][rows, at] = k, v
    size = int(at.max()) + 1
    scores = torch.einsum("bhd,blhd->bhl", q, cache.k[index][rows, :size]) * attention.scale
    scores = scores.masked_fill(torch.arange(size) > at[:, None, None], float("-inf")).softmax(-1)
    return attention.o_proj(
        torch.einsum("bhl,blhd->bhd", scores, cache.v[index][rows, :size]).flatten(1)
    )


def _prefill(model: Model, cache: _Cache, prompts: list[list[int]]) -> Tensor:
    """Run the prompts, fill the cache and return each one's first new token."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), cache.lengths.cumsum(0)])
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    rows = torch.repeat_interleave(torch.arange(len(prompts)), cache.lengths)
    table = rope_table(model.c, positions)
    h = model.model.embed_tokens(torch.tensor([t for p in prompts for t in p]))
    for index, layer in enumerate(model.model.layers[:-1]):
        x = layer.input_layernorm(h)
        k, v = layer.self_attn.expand(*layer.self_attn.latents(x, table))
        cache.k[index][rows, positions], cache.v[index][rows, positions] = k, v
        h = layer(h, table, bounds)
    return model.lm_head(model.model.norm(h[bounds[1:] - 1])).argmax(-1)


@torch.no_grad()
def generate(model: Model, prompts: list[list[int]], num_new: int = 320) -> list[list[int]]:
    """Return the greedy replies. Each ends with the end token, or at `num_new` tokens."""
    cache = _Cache(model, prompts, num_new)
    replies = [[token] for token in _prefill(model, cache, prompts).tolist()]
    rows = torch.arange(len(prompts))
    for _ in range(num_new - 1):
        rows = torch.tensor([row for row in rows.tolist() if replies[row][-1] != EOS_ID])
        if len(rows) == 0:
            break
        at = cache.lengths[rows]
        cache.lengths[rows] += 1
        table = rope_table(model.c, at)
        h = model.model.embed_tokens(torch.tensor([replies[row][-1] for row in rows.tolist()]))
        for index, layer in enumerate(model.model.layers[:-1]):
            h = h + _attend(layer, layer.input_layernorm(h), table, cache, index, rows, at)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        tokens = model.lm_head(model.model.norm(h)).argmax(-1).tolist()
        for row, token in zip(rows.tolist(), tokens, strict=True):
            replies[row].append(token)
    return replies


@torch.no_grad()
def acceptance(model: Model, batch: Batch) -> tuple[float, float]:
    """Return the acceptance of the MTP layer's first draft, and of its second draft where the first
    was accepted. A draft is accepted if it equals the model's greedy choice.

    Drafts are made as in serving: the first from the model's state and the next token, the second
    from the layer's own state and its own first draft.
    """
    h = model.hidden(batch.tokens, batch.positions, batch.bounds)
    text = (h, batch.next_tokens, batch.positions, batch.bounds)
    states = model.mtp_hidden(*text)
    rows = (batch.mtp_targets >= 0).nonzero()[:, 0]
    drafts = model.lm_head(states[rows]).argmax(-1)
    is_right = drafts == model.lm_head(h[rows + 1]).argmax(-1)
    # A second draft counts only if a step would look at it, and if there is a third token.
    goes_on = is_right & (batch.second_targets[rows] >= 0)
    rows, drafts = rows[goes_on], drafts[goes_on]
    again = model.lm_head(model.mtp_second_hidden(*text, states, rows, drafts)).argmax(-1)
    is_right_again = again == model.lm_head(h[rows + 2]).argmax(-1)
    return is_right.float().mean().item(), is_right_again.float().mean().item()


@torch.no_grad()
def expert_load(model: Model, batch: Batch) -> tuple[list[float], list[float]]:
    """Return two values per MoE layer: the largest expert load as a multiple of the mean load, and the share
    of experts without tokens. The MTP layer is applied once.
    """
    for module in model.modules():
        if isinstance(module, MoE):
            module.counts.zero_()
    h = model.hidden(batch.tokens, batch.positions, batch.bounds)
    model.mtp_hidden(h, batch.next_tokens, batch.positions, batch.bounds)
    counts = [module.counts for module in model.modules() if isinstance(module, MoE)]
    return (
        [(c.max() / c.mean()).item() for c in counts],
        [(c == 0).float().mean().item() for c in counts],
    )


def ask(
    model: Model, tokenizer: Tokenizer, examples: list[Example], batch_size: int = 64
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return (reply texts, prompts, reply tokens); prompts of similar size run together."""
    prompts = [encode(tokenizer, example)[0] for example in examples]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    replies: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), batch_size):
        part = order[begin : begin + batch_size]
        for index, reply in zip(part, generate(model, [prompts[i] for i in part]), strict=True):
            replies[index] = reply
    return [tokenizer.decode(r, skip_special_tokens=True) for r in replies], prompts, replies


def main() -> None:
    """Parse the arguments, ask, and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/hadal-tiny"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print per task")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    rng, right, all_prompts, all_replies = random.Random(args.seed), Counter(), [], []
    begin = time.perf_counter()
    for task in TASKS:
        examples = [sample_split(rng, task, True) for _ in range(args.count)]
        texts, prompts, replies = ask(model, tokenizer, examples)
        wrong = [(e, t) for e, t in zip(examples, texts, strict=True) if not is_correct(e, t)]
        right[task] = args.count - len(wrong)
        print(f"{task:12s} {right[task] / args.count:7.1%}", flush=True)
        for example, text in wrong[: args.show]:
            print(
                f"   {render_prompt(example)[-300:]!r}\n   should {example.reasoning!r}"
                f" {example.answer!r}"
            )
            print(f"   said   {text!r}")
        all_prompts += prompts
        all_replies += replies
    encoded = list(zip(all_prompts, all_replies, strict=True))
    batch = pack(encoded, [])
    first, second = acceptance(model, batch)
    skew, idle = expert_load(model, batch)
    by_task = {}
    for index, task in enumerate(TASKS):
        part = pack(encoded[index * args.count : (index + 1) * args.count], [])
        by_task[task] = [round(s, 1) for s in expert_load(model, part)[0]]
    print(
        json.dumps(
            {
                "overall": round(sum(right.values()) / (args.count * len(TASKS)), 4),
                "questions": args.count * len(TASKS),
                **{task: right[task] / args.count for task in TASKS},
                "mtp_acceptance": round(first, 4),
                "mtp_acceptance_second": round(second, 4),
                "load_max_over_mean": [round(s, 2) for s in skew],
                "of_one_task": by_task,
                "idle_experts": [round(s, 3) for s in idle],
                "tokens_generated": sum(map(len, all_replies)),
                "seconds": round(time.perf_counter() - begin, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
