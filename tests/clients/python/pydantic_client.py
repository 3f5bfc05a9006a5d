"""pydantic-ai by chat, responses and messages."""

from __future__ import annotations

import trial
from anthropic import AsyncAnthropic
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{trial.URL}/v1", api_key=trial.KEY)
chat = OpenAIChatModel(trial.MODEL, provider=openai)
responses = OpenAIResponsesModel(trial.MODEL, provider=openai)
messages = AnthropicModel(
    trial.MODEL,
    provider=AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=trial.URL, api_key=trial.KEY, max_retries=0)
    ),
)
SETTINGS: dict = {"temperature": 0, "timeout": 600, "max_tokens": 400}


def _text(model: Model) -> str:
    output = Agent(model, model_settings=SETTINGS).run_sync(trial.SUM).output
    return trial.expect(trial.SUM_ANSWER in output, output)


def _tool(model: Model) -> str:
    agent = Agent(model, tools=[trial.calculate], model_settings=SETTINGS)
    output = agent.run_sync(trial.PRODUCT, usage_limits=UsageLimits(request_limit=4)).output
    return trial.expect(trial.PRODUCT_ANSWER in trial.digits(output), output)


def chat_text() -> str:
    """OpenAIChatModel"""
    return _text(chat)


def chat_tool() -> str:
    """OpenAIChatModel with a tool"""
    return _tool(chat)


def chat_output() -> str:
    """NativeOutput of a Pydantic model"""
    output = (
        Agent(chat, output_type=NativeOutput(trial.Person), model_settings=SETTINGS)
        .run_sync(trial.PERSON)
        .output
    )
    return trial.expect(isinstance(output, trial.Person), output)


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
    trial.run(f"pydantic-ai {trial.version('pydantic-ai-slim')}")
