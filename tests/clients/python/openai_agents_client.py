"""OpenAI's Agents SDK, and Instructor."""

from __future__ import annotations

import instructor
import openai
import trial
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model

set_tracing_disabled(True)
client = openai.AsyncOpenAI(
    base_url=f"{trial.URL}/v1", api_key=trial.KEY, max_retries=0, timeout=600
)


def _agent(model: Model, question: str, answer: str) -> str:
    agent = Agent(name="Reckoner", model=model, tools=[function_tool(trial.calculate)])
    output = Runner.run_sync(agent, question, max_turns=4).final_output
    return trial.expect(answer in trial.digits(output), output)


def chat_agent() -> str:
    """Agents SDK by chat, no tool needed"""
    return _agent(OpenAIChatCompletionsModel(trial.MODEL, client), trial.SUM, trial.SUM_ANSWER)


def chat_tool() -> str:
    """Agents SDK by chat, with a tool"""
    return _agent(
        OpenAIChatCompletionsModel(trial.MODEL, client), trial.PRODUCT, trial.PRODUCT_ANSWER
    )


def responses_tool() -> str:
    """Agents SDK by responses, with a tool"""
    return _agent(OpenAIResponsesModel(trial.MODEL, client), trial.PRODUCT, trial.PRODUCT_ANSWER)


def instructor_json() -> str:
    """Instructor, response_model by JSON schema"""
    asked = instructor.from_openai(
        openai.OpenAI(base_url=f"{trial.URL}/v1", api_key=trial.KEY, max_retries=0, timeout=600),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    person = asked.create(
        model=trial.MODEL,
        response_model=trial.Person,
        messages=trial.user(trial.PERSON),
        max_retries=0,
        temperature=0,
    )
    return trial.expect(isinstance(person, trial.Person), person)


if __name__ == "__main__":
    trial.run(
        f"openai-agents {trial.version('openai-agents')}, instructor {trial.version('instructor')}"
    )
