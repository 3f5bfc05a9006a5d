"""DeepSeek's published example clients run with only base URL and model changed, through the
official OpenAI package.

The example of a whole reply is from "Your first API call", the one of a stream from "Thinking mode"
(api-docs.deepseek.com). The latter reads `reasoning_content` of every chunk's delta, and adds up
`content` of the deltas without it. So both keys must always be there, and `content` must be a
string in the last chunk too.
"""

from __future__ import annotations

from openai import OpenAI

from hadal.gateway.desk.service import ServedModel

from .scenes import TEXT
from .serving import serving
from .world import spell


def test_first_call(model: ServedModel) -> None:
    with (
        serving(model, spell(model, TEXT)) as server,
        OpenAI(api_key="none", base_url=server.url) as client,
    ):
        response = client.chat.completions.create(
            model="small",
            messages=[
                {"role": "system", "content": "You are a helpful assistant"},
                {"role": "user", "content": "Hello"},
            ],
            stream=False,
            reasoning_effort="high",
            extra_body={"thinking": {"type": "enabled"}},
        )
        assert response.choices[0].message.content == "The answer is 4. 🙂"


def test_streaming_in_thinking_mode(model: ServedModel) -> None:
    with (
        serving(model, spell(model, TEXT)) as server,
        OpenAI(api_key="none", base_url=server.url) as client,
    ):
        messages = [{"role": "user", "content": "9.11 and 9.8, which is greater?"}]
        for _ in range(2):
            response = client.chat.completions.create(
                model="small",
                messages=messages,  # type: ignore[arg-type]
                stream=True,
                reasoning_effort="high",
                extra_body={"thinking": {"type": "enabled"}},
            )

            reasoning_content = ""
            content = ""

            for chunk in response:
                if chunk.choices[0].delta.reasoning_content:  # type: ignore[attr-defined]
                    reasoning_content += chunk.choices[0].delta.reasoning_content  # type: ignore[attr-defined]
                else:
                    content += chunk.choices[0].delta.content  # type: ignore[operator]

            assert (reasoning_content, content) == ("Easy.", "The answer is 4. 🙂")
            messages.append(
                {"role": "assistant", "reasoning_content": reasoning_content, "content": content}
            )
            messages.append(
                {"role": "user", "content": "How many Rs are there in the word 'strawberry'?"}
            )
