"""OpenAI's Agents SDK, and Instructor."""

from __future__ import annotations

import importlib.metadata

import instructor
import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
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

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=180)


class Person(BaseModel):
    name: str
    age: int
    city: str


def _agent(model: Model, question: str, answer: str) -> str:
    agent = Agent(name="Reckoner", model=model, tools=[function_tool(calculate)])
    output = Runner.run_sync(agent, question, max_turns=4).final_output
    return expect(answer in digits(output), output)


def chat_agent() -> str:
    """Agents SDK by chat, no tool needed"""
    return _agent(OpenAIChatCompletionsModel(MODEL, client), SUM, SUM_ANSWER)


def chat_tool() -> str:
    """Agents SDK by chat, with a tool"""
    return _agent(OpenAIChatCompletionsModel(MODEL, client), PRODUCT, PRODUCT_ANSWER)


def responses_tool() -> str:
    """Agents SDK by responses, with a tool"""
    return _agent(OpenAIResponsesModel(MODEL, client), PRODUCT, PRODUCT_ANSWER)


def instructor_json() -> str:
    """Instructor, response_model by JSON schema"""
    asked = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=180),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    person = asked.create(
        model=MODEL,
        response_model=Person,
        messages=[{"role": "user", "content": PERSON}],
        max_retries=0,
        temperature=0,
    )
    return expect(isinstance(person, Person), person)


if __name__ == "__main__":
    run(
        f"openai-agents {importlib.metadata.version('openai-agents')}, "
        f"instructor {importlib.metadata.version('instructor')}",
        chat_agent, chat_tool, responses_tool, instructor_json,
    )  # fmt: skip
