"""LangChain by three of its providers: OpenAI's, DeepSeek's, Anthropic's."""

from __future__ import annotations

import importlib.metadata

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_anthropic import ChatAnthropic
from langchain_deepseek import ChatDeepSeek
from langchain_openai import ChatOpenAI
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

ASK: dict = {"model": MODEL, "temperature": 0, "max_retries": 0, "timeout": 60}
by_openai = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, **ASK)
by_responses = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True, **ASK)
by_deepseek = ChatDeepSeek(api_base=f"{URL}/v1", api_key=KEY, **ASK)
by_anthropic = ChatAnthropic(base_url=URL, api_key=KEY, max_tokens=300, **ASK)


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


def _invoke(model: object) -> str:
    reply = model.invoke(SUM)
    return expect(
        SUM_ANSWER in str(reply.text) and reply.usage_metadata["output_tokens"] > 0, reply.text
    )


def _agent(model: object) -> str:
    agent = create_agent(model, tools=[tool(calculate, parse_docstring=True)])
    messages = agent.invoke({"messages": [("user", PRODUCT)]}, {"recursion_limit": 8})["messages"]
    kinds = [message.type for message in messages]
    return expect(
        "tool" in kinds and PRODUCT_ANSWER in digits(messages[-1].text), messages[-1].text
    )


def openai_invoke() -> str:
    """ChatOpenAI invoke"""
    return _invoke(by_openai)


def openai_stream() -> str:
    """ChatOpenAI stream"""
    text = "".join(chunk.text for chunk in by_openai.stream(SUM))
    return expect(SUM_ANSWER in text, text)


def openai_structured() -> str:
    """with_structured_output"""
    person = by_openai.with_structured_output(Person).invoke(PERSON)
    return expect(isinstance(person, Person), person)


def openai_agent() -> str:
    """create_agent with ChatOpenAI"""
    return _agent(by_openai)


def responses_invoke() -> str:
    """ChatOpenAI by responses"""
    return _invoke(by_responses)


def deepseek_invoke() -> str:
    """ChatDeepSeek, with its reasoning"""
    reply = by_deepseek.invoke(SUM)
    return expect(
        SUM_ANSWER in reply.text and reply.additional_kwargs.get("reasoning_content"), reply.text
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
    run(
        f"LangChain {importlib.metadata.version('langchain')}",
        openai_invoke, openai_stream, openai_structured, openai_agent, responses_invoke, deepseek_invoke,
        deepseek_agent, anthropic_invoke, anthropic_agent,
    )  # fmt: skip
