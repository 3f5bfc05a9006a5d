"""LangChain's standard tests of chat models (langchain-tests), for the three formats of the API.

Collected by pytest in an environment of its own; tests/clients starts it. Each class is one client
with temperature 0, so that each run draws the same tokens.
"""

from __future__ import annotations

import trial
from langchain_anthropic import ChatAnthropic
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

_ASK = {"model": trial.MODEL, "api_key": trial.KEY, "temperature": 0}
_OPENAI = {**_ASK, "base_url": f"{trial.URL}/v1"}


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
        return {**_ASK, "api_base": f"{trial.URL}/v1", "stream_usage": True}

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
        return {**_ASK, "base_url": trial.URL}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
