"""Anthropic's own client against /v1/messages."""

from __future__ import annotations

import anthropic
import trial

client = anthropic.Anthropic(base_url=trial.URL, api_key=trial.KEY, max_retries=0, timeout=600)
ASK: dict = {"model": trial.MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}


def _text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def create() -> str:
    """messages.create"""
    message = client.messages.create(**ASK, messages=trial.user(trial.SUM))
    return trial.expect(
        trial.SUM_ANSWER in _text_of(message) and message.stop_reason == "end_turn",
        _text_of(message),
    )


def stream() -> str:
    """messages.stream"""
    with client.messages.stream(**ASK, messages=trial.user(trial.SUM)) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    return trial.expect(trial.SUM_ANSWER in text and final.usage.output_tokens > 0, text)


def thinking() -> str:
    """thinking blocks"""
    message = client.messages.create(
        model=trial.MODEL,
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=trial.user(trial.SUM),
    )
    kinds = [block.type for block in message.content]
    return trial.expect(kinds[:1] == ["thinking"] and "text" in kinds, kinds)


def tools() -> str:
    """tool_use, tool_result, the answer"""
    tool = {
        "name": "calculate",
        "description": "Compute with two whole numbers.",
        "input_schema": trial.CALCULATE,
    }
    messages: list = trial.user(trial.PRODUCT)
    first = client.messages.create(**ASK, tools=[tool], messages=messages)
    trial.expect(first.stop_reason == "tool_use", first.stop_reason)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": str(trial.calculate(**block.input)),
        }
        for block in first.content
        if block.type == "tool_use"
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    last = client.messages.create(**ASK, tools=[tool], messages=messages)
    return trial.expect(trial.PRODUCT_ANSWER in trial.digits(_text_of(last)), _text_of(last))


@anthropic.beta_tool(input_schema=trial.CALCULATE)
def calculate(a: int, operator: str, b: int) -> str:
    """Compute with two whole numbers.

    Args:
        a: The first number.
        operator: One of +, -, *.
        b: The second number.
    """
    return str(trial.calculate(a, operator, b))


def runner() -> str:
    """beta.messages.tool_runner"""
    runs = client.beta.messages.tool_runner(
        **ASK, tools=[calculate], messages=trial.user(trial.PRODUCT), max_iterations=4
    )
    text = "".join(block.text for block in runs.until_done().content if block.type == "text")
    return trial.expect(trial.PRODUCT_ANSWER in trial.digits(text), text)


def count() -> str:
    """messages.count_tokens"""
    tokens = client.messages.count_tokens(
        model=trial.MODEL, messages=trial.user(trial.SUM)
    ).input_tokens
    used = client.messages.create(**ASK, messages=trial.user(trial.SUM)).usage
    return trial.expect(
        tokens == used.input_tokens + (used.cache_read_input_tokens or 0), f"{tokens} tokens"
    )


def errors() -> str:
    """an unknown model is the client's own error"""
    try:
        client.messages.create(model="nobody", max_tokens=5, messages=trial.user("x"))
    except anthropic.NotFoundError as error:
        return trial.expect(error.body["error"]["type"] == "not_found_error", error.body)
    raise AssertionError("the model nobody was taken")


if __name__ == "__main__":
    trial.run(f"anthropic {trial.version('anthropic')} (Python)")
