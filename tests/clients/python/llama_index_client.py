"""LlamaIndex by its OpenAI-compatible and its DeepSeek class."""

from __future__ import annotations

import asyncio
import importlib.metadata

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.deepseek import DeepSeek
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from trial import (
    KEY,
    MODEL,
    PERSON,
    PRODUCT,
    PRODUCT_ANSWER,
    SUM,
    SUM_ANSWER,
    URL,
    calculate,
    digits,
    expect,
    run,
)

ASK: dict = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "temperature": 0,
    "max_retries": 0,
}
like = OpenAILike(
    **ASK,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=4096,
    timeout=180,
)
deepseek = DeepSeek(**ASK, timeout=180)


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


def chat() -> str:
    """chat"""
    text = str(like.chat([ChatMessage(role="user", content=SUM)]).message.content)
    return expect(SUM_ANSWER in text, text)


def stream() -> str:
    """stream_chat"""
    text = "".join(
        chunk.delta or "" for chunk in like.stream_chat([ChatMessage(role="user", content=SUM)])
    )
    return expect(SUM_ANSWER in text, text)


def by_deepseek() -> str:
    """DeepSeek's class"""
    text = str(deepseek.chat([ChatMessage(role="user", content=SUM)]).message.content)
    return expect(SUM_ANSWER in text, text)


def structured() -> str:
    """as_structured_llm"""
    person = like.as_structured_llm(Person).complete(PERSON).raw
    return expect(isinstance(person, Person), person)


def agent() -> str:
    """FunctionAgent"""

    async def ask() -> str:
        return str(
            await asyncio.wait_for(FunctionAgent(llm=like, tools=[calculate]).run(PRODUCT), 60)
        )

    text = asyncio.run(ask())
    return expect(PRODUCT_ANSWER in digits(text), text)


if __name__ == "__main__":
    run(
        f"LlamaIndex {importlib.metadata.version('llama-index-core')}",
        chat, stream, by_deepseek, structured, agent,
    )  # fmt: skip
