"""LangChain's standard tests of chat models (langchain-tests), for the three formats of the API.

Collected by pytest in an environment of its own; tests/clients starts it. Each class is one client
with the suite's own settings: temperature 0, at most 100 tokens, 2 retries.
"""

from __future__ import annotations

import trial
from langchain_anthropic import ChatAnthropic
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

_OPENAI = {"model": trial.MODEL, "base_url": f"{trial.URL}/v1", "api_key": trial.KEY}


class TestChatOpenAI(ChatModelIntegrationTests):
    """Chats."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {**_OPENAI, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatOpenAIResponses(TestChatOpenAI):
    """Responses."""

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {**_OPENAI, "use_responses_api": True}


class TestChatDeepSeek(ChatModelIntegrationTests):
    """Chats in DeepSeek's form."""

    @property
    def chat_model_class(self) -> type[ChatDeepSeek]:
        return ChatDeepSeek

    @property
    def chat_model_params(self) -> dict[str, object]:
        place = {"api_base": f"{trial.URL}/v1", "api_key": trial.KEY}
        return {"model": trial.MODEL, "stream_usage": True, **place}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatAnthropic(ChatModelIntegrationTests):
    """Messages."""

    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": trial.MODEL, "base_url": trial.URL, "api_key": trial.KEY}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
