"""A model that follows a script: the next token is a function of the tokens before it, as with any
model, but a script chooses it.

The model writes each token's id into the KV cache in place of its latent, and reads the text so far
from there. So prefix caches, KV transfer, preemption and retries must work for an answer to be
right. Runner, sampler, grammars and everything else of the server are real.

Where a grammar bars the script's token, the model leaves the script: it prefers tokens that end
what has begun, so that each answer ends.

Shapes: T tokens, B rows, M blocks of a request, V vocabulary.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.deepseek import Rows
from hadal.runtime.rank import host, runner

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "hadal-tiny"
CONTEXT_TOKENS = 200_000
NUM_LAYERS = 2
"""Layers of the folder's config. Their weights are loaded and not used."""
VARIABLE = "HADAL_TEST_SCRIPT"
"""Environment variable: name of the script."""
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
RESULT, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
ENDINGS = (EOS, CALLS_END, CALL_END, SEPARATOR, '"', "}", "]", THOUGHT)
"""Texts of tokens that end something, the most preferred first."""
_APART = 50.0
"""Difference of two logits."""
TEMPLATE = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = ns.system + m['content'] + '\n\n' %}{% endif %}{% endfor %}"
    "{{ bos_token + ns.system }}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}" + USER + "{{ m['content'] }}"
    "{% elif m['role'] == 'tool' %}" + RESULT + "{{ m['content'] }}" + RESULT_END
    + "{% elif m['role'] == 'assistant' %}" + ASSISTANT
    + "{% if m['reasoning_content'] is defined and m['reasoning_content'] %}"
    + THINK + "{{ m['reasoning_content'] }}{% endif %}" + THOUGHT + "{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}" + CALLS + "{% for c in m['tool_calls'] %}"
    + CALL + "{{ c['function']['name'] }}" + SEPARATOR
    + "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}"
    "{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}" + CALL_END
    + "{% endfor %}" + CALLS_END + "{% endif %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT
    + "{% if thinking is defined and thinking %}" + THINK + "{% else %}" + THOUGHT + "{% endif %}"
    "{% endif %}"
)  # fmt: skip
"""Chat template in the manner of DeepSeek-V3.1: all system texts come first, then the tools. Unlike it,
this one keeps earlier reasoning.
"""

Answer = Callable[[str, list[str], int], str]
"""(system texts and tools, user texts, number of turns of the assistant and of further user texts
after the last user text with a task) -> the answer. See `scripts`.
"""


def write_folder(folder: Path) -> Path:
    """Write a model folder with the tokens of hadal-tiny and a long context; return it."""
    folder.mkdir(parents=True)
    config = json.loads((SHIPPED / "config.json").read_text())
    config |= {
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    words |= {"chat_template": TEMPLATE, "model_max_length": CONTEXT_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    for path in SHIPPED.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


class ScriptedModel:
    """Stand-in for hadal.model.deepseek.DeepseekV3."""

    comm = None
    has_fused_step = False

    def __init__(self, config: ModelConfig, cache: KvCache, tokenizer: Tokenizer, answer: Answer):
        self.config = config
        self.cache = cache
        self._tokenizer = tokenizer
        self._answer = answer
        self._ids = {
            text: tokenizer.token_to_id(text) for text in (BOS, EOS, USER, ASSISTANT, RESULT)
        }
        # Far apart, so that any temperature draws the first allowed one.
        self._off_script_V = -_APART * torch.arange(config.vocab_size, dtype=torch.float32)
        for i, text in enumerate(reversed(ENDINGS)):
            self._off_script_V[tokenizer.token_to_id(text)] = _APART * (i + 1)
        self._reply = functools.lru_cache(maxsize=64)(self._reply_to)

    def prefill_split(
        self,
        chunks: Sequence[Sequence[Chunk]],
        wanted: Sequence[Sequence[int]],
        *args: Any,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Write the chunks' tokens, and return logits after the wanted chunks, as DeepseekV3 does."""
        logits = []
        for part, final_chunks in zip(chunks, wanted, strict=True):
            for chunk in part:
                self._write(np.array(chunk.block_ids), chunk.start, np.array(chunk.tokens))
            rows = [
                self._logits(np.array(part[i].block_ids), part[i].start + len(part[i].tokens))
                for i in final_chunks
            ]
            logits.append(torch.stack(rows) if rows else torch.empty(0, self.config.vocab_size))
        return logits

    def prepare_decode(self, max_batch: int) -> None:
        """Do nothing: the model has no buffers."""

    def decode_rows(
        self, rows: Sequence[Rows], *args: Any, **kwargs: Any
    ) -> list[tuple[Tensor, Tensor]]:
        """Write each row's token, and return (logits [B, V], hidden states [B, 0])."""
        outputs = []
        for tokens_B, positions_B, table_BM in rows:
            logits = []
            for token, position, table_M in zip(
                tokens_B.tolist(), positions_B.tolist(), table_BM.numpy(), strict=True
            ):
                self._write(table_M, position, np.array([token]))
                logits.append(self._logits(table_M, position + 1))
            logits_BV = torch.stack(logits) if logits else torch.empty(0, self.config.vocab_size)
            outputs.append((logits_BV, torch.empty(len(logits), 0)))
        return outputs

    def _write(self, table_M: np.ndarray, start: int, tokens_T: np.ndarray) -> None:
        positions_T = np.arange(start, start + len(tokens_T))
        entries = self.cache.cache_PLSD.numpy()
        entries[table_M[positions_T // BLOCK_TOKENS], 0, positions_T % BLOCK_TOKENS, 0] = tokens_T

    def _logits(self, table_M: np.ndarray, num_tokens: int) -> Tensor:
        """Return logits [V] after the first `num_tokens` tokens of a request."""
        table = table_M[: -(-num_tokens // BLOCK_TOKENS)]
        ids = self.cache.cache_PLSD.numpy()[table, 0, :, 0].reshape(-1)[:num_tokens].astype(int)
        logits_V = self._off_script_V.clone()
        answers = np.flatnonzero(ids == self._ids[ASSISTANT])
        if not len(answers):
            return logits_V  # The prompt is no chat.
        begin = int(answers[-1]) + 2
        reply, output = self._reply(ids[:begin].tobytes()), tuple(ids[begin:].tolist())
        if reply[: len(output)] == output:
            token = (*reply, self._ids[EOS])[len(output)]
            logits_V[token] = 2 * _APART * len(ENDINGS)
        return logits_V

    def _reply_to(self, prompt: bytes) -> tuple[int, ...]:
        """Return the tokens of the answer to a prompt."""
        ids = np.frombuffer(prompt, int).tolist()
        parts = self._parts(ids)
        head = parts[0][1]
        users = [text for kind, text in parts if kind == USER]
        num_turns = 0
        for kind, text in parts[:-1]:
            if kind == USER and "Task " in text:
                num_turns = 0
            elif kind in (ASSISTANT, USER):
                num_turns += 1
        text = self._answer(head, users, num_turns)
        if ids[-1] == self._tokenizer.token_to_id(THINK):
            text = f"Step {num_turns}.{THOUGHT}{text}"
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _parts(self, ids: list[int]) -> list[tuple[str, str]]:
        """Return (mark, text) for each part of a prompt; the first is the tools and the system text."""
        marks = {number: mark for mark, number in self._ids.items() if mark != EOS}
        parts: list[tuple[str, list[int]]] = []
        for token in ids:
            if token in marks:
                parts.append((marks[token], []))
            elif parts:
                parts[-1][1].append(token)
        return [(mark, self._tokenizer.decode(of, skip_special_tokens=False)) for mark, of in parts]


def install() -> None:
    """Replace the model of each unit that this process or one of its forks makes."""
    from tests.clients.agents.scripts import SCRIPTS

    def make_lone_runner(
        deployment: Any, config: ModelConfig, role: str, pool: Any, device: str = "cpu"
    ) -> runner.ModelRunner:
        tokenizer = Tokenizer.from_file(str(Path(deployment.model) / "tokenizer.json"))
        cache = runner.make_cache(deployment, config, role, pool, device)
        model = ScriptedModel(config, cache, tokenizer, SCRIPTS[os.environ[VARIABLE]])
        return runner.ModelRunner(
            model,  # type: ignore[arg-type]
            runner.units_of(deployment, role).max_requests,
            grammars=runner.make_grammars(deployment, config),
        )

    host.make_lone_runner = make_lone_runner
