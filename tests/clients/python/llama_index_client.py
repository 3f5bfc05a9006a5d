"""LlamaIndex by its OpenAI-compatible and its DeepSeek class."""

from __future__ import annotations

import asyncio

import trial
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.deepseek import DeepSeek
from llama_index.llms.openai_like import OpenAILike

ASK: dict = {
    "model": trial.MODEL,
    "api_base": f"{trial.URL}/v1",
    "api_key": trial.KEY,
    "temperature": 0,
    "max_retries": 0,
}
like = OpenAILike(
    **ASK,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=4096,
    timeout=600,
)
deepseek = DeepSeek(**ASK, timeout=600)


def chat() -> str:
    """chat"""
    text = str(like.chat([ChatMessage(role="user", content=trial.SUM)]).message.content)
    return trial.expect(trial.SUM_ANSWER in text, text)


def stream() -> str:
    """stream_chat"""
    text = "".join(
        chunk.delta or ""
        for chunk in like.stream_chat([ChatMessage(role="user", content=trial.SUM)])
    )
    return trial.expect(trial.SUM_ANSWER in text, text)


def by_deepseek() -> str:
    """DeepSeek's class"""
    text = str(deepseek.chat([ChatMessage(role="user", content=trial.SUM)]).message.content)
    return trial.expect(trial.SUM_ANSWER in text, text)


def structured() -> str:
    """as_structured_llm"""
    person = like.as_structured_llm(trial.Person).complete(trial.PERSON).raw
    return trial.expect(isinstance(person, trial.Person), person)


def agent() -> str:
    """FunctionAgent"""

    async def ask() -> str:
        return str(
            await asyncio.wait_for(
                FunctionAgent(llm=like, tools=[trial.calculate]).run(trial.PRODUCT), 60
            )
        )

    text = asyncio.run(ask())
    return trial.expect(trial.PRODUCT_ANSWER in trial.digits(text), text)


if __name__ == "__main__":
    trial.run(f"LlamaIndex {trial.version('llama-index-core')}")
