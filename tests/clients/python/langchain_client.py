"""LangChain by three of its providers: OpenAI's, DeepSeek's, Anthropic's."""

from __future__ import annotations

import trial
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI

ASK: dict = {"model": trial.MODEL, "temperature": 0, "max_retries": 0, "timeout": 600}
by_openai = ChatOpenAI(base_url=f"{trial.URL}/v1", api_key=trial.KEY, **ASK)
by_responses = ChatOpenAI(
    base_url=f"{trial.URL}/v1", api_key=trial.KEY, use_responses_api=True, **ASK
)
by_deepseek = ChatDeepSeek(api_base=f"{trial.URL}/v1", api_key=trial.KEY, **ASK)
by_anthropic = ChatAnthropic(base_url=trial.URL, api_key=trial.KEY, max_tokens=300, **ASK)


def _invoke(model: object) -> str:
    reply = model.invoke(trial.SUM)
    return trial.expect(
        trial.SUM_ANSWER in str(reply.text) and reply.usage_metadata["output_tokens"] > 0,
        reply.text,
    )


def _agent(model: object) -> str:
    agent = create_agent(model, tools=[tool(trial.calculate, parse_docstring=True)])
    messages = agent.invoke({"messages": [("user", trial.PRODUCT)]}, {"recursion_limit": 8})[
        "messages"
    ]
    kinds = [message.type for message in messages]
    return trial.expect(
        "tool" in kinds and trial.PRODUCT_ANSWER in trial.digits(messages[-1].text),
        messages[-1].text,
    )


def openai_invoke() -> str:
    """ChatOpenAI invoke"""
    return _invoke(by_openai)


def openai_stream() -> str:
    """ChatOpenAI stream"""
    text = "".join(chunk.text for chunk in by_openai.stream(trial.SUM))
    return trial.expect(trial.SUM_ANSWER in text, text)


def openai_structured() -> str:
    """with_structured_output"""
    person = by_openai.with_structured_output(trial.Person).invoke(trial.PERSON)
    return trial.expect(isinstance(person, trial.Person), person)


def openai_agent() -> str:
    """create_agent with ChatOpenAI"""
    return _agent(by_openai)


def responses_invoke() -> str:
    """ChatOpenAI by responses"""
    return _invoke(by_responses)


def deepseek_invoke() -> str:
    """ChatDeepSeek, with its reasoning"""
    reply = by_deepseek.invoke(trial.SUM)
    return trial.expect(
        trial.SUM_ANSWER in reply.text and reply.additional_kwargs.get("reasoning_content"),
        reply.text,
    )


def deepseek_agent() -> str:
    """create_agent with ChatDeepSeek"""
    return _agent(by_deepseek)


def anthropic_invoke() -> str:
    """ChatAnthropic invoke"""
    return _invoke(by_anthropic)


def anthropic_agent() -> str:
    """create_agent with ChatAnthropic"""
    return _agent(by_anthropic)


if __name__ == "__main__":
    trial.run(f"LangChain {trial.version('langchain')}")
