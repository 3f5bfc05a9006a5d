"""A stand-in for a model that calls tools in DeepSeek-V3.1's format, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from pydantic import BaseModel

from hadal.core.messages.generation import Generation
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.asks import SamplingDefaults

from .fake_units import Script
from .test_tools import EOS, V31, VOCABULARY, listing_chat, written


class Verdict(BaseModel):
    """Structured answer that clients request by its schema."""

    colour: str


@contextmanager
def tool_model() -> Iterator[ServedModel]:
    """Yield a model named "small" with a template that lists tools."""
    with closing(listing_chat(VOCABULARY)) as chat:
        yield ServedModel(
            name="small",
            vocabulary=VOCABULARY,
            chat=chat,
            context_tokens=16_384,
            vocab_size=len(VOCABULARY),
            eos_ids=(VOCABULARY.control_ids[EOS],),
            sampling=SamplingDefaults(),
        )


def says(choose: Callable[[str], str]) -> Script:
    """Return the script of a model that answers a prompt with the text that `choose` returns."""

    def script(generation: Generation, index: int) -> int:
        ids = VOCABULARY.encode_controlled(choose(VOCABULARY.decode(generation.prompt)))
        return ids[index] if index < len(ids) else VOCABULARY.control_ids[EOS]

    return script


def calls_then(name: str, arguments: str, answer: Callable[[str], str]) -> Script:
    """Return the script of a model that calls a tool once, then answers with `answer(result)`."""

    def choose(prompt: str) -> str:
        _, found, result = prompt.rpartition("<out>")
        if found:
            return answer(result.partition("</out>")[0])
        return "Let me see." + written(V31, (name, arguments))

    return says(choose)
