"""OpenAI's own client: chat, completions, responses, tools, Pydantic, files and batches."""

from __future__ import annotations

import json
import time

import openai
import trial

client = openai.OpenAI(base_url=f"{trial.URL}/v1", api_key=trial.KEY, max_retries=0, timeout=600)


def models() -> str:
    """models.list"""
    names = [model.id for model in client.models.list()]
    return trial.expect(trial.MODEL in names, names)


def chat() -> str:
    """chat.completions.create"""
    reply = client.chat.completions.create(
        model=trial.MODEL, messages=trial.user(trial.SUM), temperature=0
    )
    return trial.expect(
        trial.SUM_ANSWER in (reply.choices[0].message.content or ""),
        reply.choices[0].message.content,
    )


def chat_stream() -> str:
    """chat.completions.stream, with usage"""
    with client.chat.completions.stream(
        model=trial.MODEL,
        messages=trial.user(trial.SUM),
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    return trial.expect(
        trial.SUM_ANSWER in text and final.usage and final.usage.completion_tokens > 0, text
    )


def thinking() -> str:
    """reasoning_content, switched off by thinking"""
    ask = {"model": trial.MODEL, "messages": trial.user(trial.SUM), "temperature": 0}
    on = (
        client.chat.completions.create(**ask, extra_body={"thinking": {"type": "enabled"}})
        .choices[0]
        .message
    )
    off = (
        client.chat.completions.create(**ask, extra_body={"thinking": {"type": "disabled"}})
        .choices[0]
        .message
    )
    thought = getattr(on, "reasoning_content", None)
    return trial.expect(thought and not getattr(off, "reasoning_content", None), thought)


def tools() -> str:
    """a tool's call, its result, the answer"""
    messages: list = trial.user(trial.PRODUCT)
    first = client.chat.completions.create(
        model=trial.MODEL, messages=messages, tools=[trial.TOOL], temperature=0
    ).choices[0]
    trial.expect(first.finish_reason == "tool_calls", first)
    messages.append(first.message.model_dump(exclude_none=True))
    for call in first.message.tool_calls or []:
        result = trial.calculate(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    last = client.chat.completions.create(
        model=trial.MODEL, messages=messages, tools=[trial.TOOL], temperature=0
    ).choices[0]
    return trial.expect(
        trial.PRODUCT_ANSWER in trial.digits(last.message.content), last.message.content
    )


def tools_stream() -> str:
    """a tool's call in deltas"""
    with client.chat.completions.stream(
        model=trial.MODEL, messages=trial.user(trial.PRODUCT), tools=[trial.TOOL], temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        call = (stream.get_final_completion().choices[0].message.tool_calls or [None])[0]
    return trial.expect(
        "tool_calls.function.arguments.delta" in kinds and call, call and call.function.arguments
    )


def strict_tool() -> str:
    """a strict tool that must be called"""
    tool = {
        "type": "function",
        "function": {"name": "calculate", "strict": True, "parameters": trial.CALCULATE},
    }
    reply = client.chat.completions.create(
        model=trial.MODEL, messages=trial.user(trial.PRODUCT), tools=[tool], tool_choice="required"
    )
    arguments = (reply.choices[0].message.tool_calls or [])[0].function.arguments
    return trial.expect(set(json.loads(arguments)) == {"a", "operator", "b"}, arguments)


def parse() -> str:
    """chat.completions.parse with Pydantic"""
    reply = client.chat.completions.parse(
        model=trial.MODEL,
        messages=trial.user(trial.PERSON),
        response_format=trial.Person,
        temperature=0,
    )
    return trial.expect(
        isinstance(reply.choices[0].message.parsed, trial.Person), reply.choices[0].message.parsed
    )


def logprobs() -> str:
    """log-probabilities"""
    reply = client.chat.completions.create(
        model=trial.MODEL,
        messages=trial.user(trial.SUM),
        logprobs=True,
        top_logprobs=3,
        temperature=0,
    )
    content = reply.choices[0].logprobs.content or []
    return trial.expect(content and len(content[0].top_logprobs) == 3, f"{len(content)} tokens")


def completions() -> str:
    """completions with echo and log-probabilities"""
    reply = client.completions.create(
        model=trial.MODEL, prompt="one two three", echo=True, logprobs=1, max_tokens=1
    )
    found = reply.choices[0].logprobs
    return trial.expect(
        found and found.token_logprobs[0] is None and found.token_logprobs[1] < 0,
        found.token_logprobs,
    )


def responses() -> str:
    """responses.create, and one that follows it"""
    first = client.responses.create(model=trial.MODEL, input=trial.SUM, temperature=0)
    trial.expect(trial.SUM_ANSWER in first.output_text, first.output_text)
    second = client.responses.create(
        model=trial.MODEL, input="And plus 1?", previous_response_id=first.id, temperature=0
    )
    return trial.expect(second.output_text, second.output_text)


def responses_stream() -> str:
    """responses.stream"""
    with client.responses.stream(model=trial.MODEL, input=trial.SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        text = stream.get_final_response().output_text
    return trial.expect(trial.SUM_ANSWER in text and "response.output_text.delta" in kinds, text)


def responses_parse() -> str:
    """responses.parse with Pydantic"""
    reply = client.responses.parse(
        model=trial.MODEL, input=trial.PERSON, text_format=trial.Person, temperature=0
    )
    return trial.expect(isinstance(reply.output_parsed, trial.Person), reply.output_parsed)


def responses_tools() -> str:
    """responses with a function, its output, the answer"""
    tool = {"type": "function", "name": "calculate", "parameters": trial.CALCULATE, "strict": False}
    first = client.responses.create(
        model=trial.MODEL, input=trial.PRODUCT, tools=[tool], temperature=0
    )
    calls = [item for item in first.output if item.type == "function_call"]
    trial.expect(calls, first.output)
    outputs = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": str(trial.calculate(**json.loads(call.arguments))),
        }
        for call in calls
    ]
    last = client.responses.create(
        model=trial.MODEL, input=outputs, tools=[tool], previous_response_id=first.id, temperature=0
    )
    return trial.expect(trial.PRODUCT_ANSWER in trial.digits(last.output_text), last.output_text)


def batches() -> str:
    """files and batches"""
    body = {"model": trial.MODEL, "messages": trial.user(trial.SUM), "temperature": 0}
    lines = "\n".join(
        json.dumps(
            {"custom_id": f"n{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        )
        for i in range(3)
    )
    file = client.files.create(file=("sums.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    # If the batch takes too long, the process that runs this script ends it.
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    trial.expect(batch.status == "completed", batch)
    answers = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
    return trial.expect(len(texts) == 3 and all(trial.SUM_ANSWER in text for text in texts), texts)


def errors() -> str:
    """an unknown model and a bad value are the client's own errors"""
    try:
        client.chat.completions.create(model="nobody", messages=trial.user("x"))
    except openai.NotFoundError as error:
        seen = error.code
    try:
        client.chat.completions.create(model=trial.MODEL, messages=trial.user("x"), temperature=9)
    except openai.BadRequestError as error:
        return trial.expect(error.param == "temperature", f"{seen}, {error.param}")
    raise AssertionError("temperature 9 was taken")


if __name__ == "__main__":
    trial.run(f"openai {trial.version('openai')} (Python)")
