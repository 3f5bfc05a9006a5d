"""pydantic-ai by chat, responses and messages."""

from __future__ import annotations

import importlib.metadata

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
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

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=openai)
responses = OpenAIResponsesModel(MODEL, provider=openai)
messages = AnthropicModel(
    MODEL,
    provider=AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    ),
)
SETTINGS: dict = {"temperature": 0, "timeout": 60, "max_tokens": 400}


class Person(BaseModel):
    name: str
    age: int
    city: str


def _text(model: Model) -> str:
    output = Agent(model, model_settings=SETTINGS).run_sync(SUM).output
    return expect(SUM_ANSWER in output, output)


def _tool(model: Model) -> str:
    agent = Agent(model, tools=[calculate], model_settings=SETTINGS)
    output = agent.run_sync(PRODUCT, usage_limits=UsageLimits(request_limit=4)).output
    return expect(PRODUCT_ANSWER in digits(output), output)


def chat_text() -> str:
    """OpenAIChatModel"""
    return _text(chat)


def chat_tool() -> str:
    """OpenAIChatModel with a tool"""
    return _tool(chat)


def chat_output() -> str:
    """NativeOutput of a Pydantic model"""
    output = (
        Agent(chat, output_type=NativeOutput(Person), model_settings=SETTINGS)
        .run_sync(PERSON)
        .output
    )
    return expect(isinstance(output, Person), output)


def responses_text() -> str:
    """OpenAIResponsesModel"""
    return _text(responses)


def responses_tool() -> str:
    """OpenAIResponsesModel with a tool"""
    return _tool(responses)


def messages_text() -> str:
    """AnthropicModel"""
    return _text(messages)


def messages_tool() -> str:
    """AnthropicModel with a tool"""
    return _tool(messages)


if __name__ == "__main__":
    run(
        f"pydantic-ai {importlib.metadata.version('pydantic-ai-slim')}",
        chat_text, chat_tool, chat_output, responses_text, responses_tool, messages_text, messages_tool,
    )  # fmt: skip
