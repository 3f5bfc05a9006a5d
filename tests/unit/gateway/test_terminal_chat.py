"""The terminal chat against a gateway behind a real port."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from hadal.apps.terminal.chat import Chat, ChatError, chat, first_model
from hadal.gateway.desk.service import ServedModel

from .serving import serving
from .world import spell

TEXT = "Easy.</think>\n\nFour [bold]is[/bold] it."


def talk(url: str, lines: str, **options: Any) -> tuple[int, str]:
    shown = io.StringIO()
    console = Console(file=shown, width=200, color_system=None)
    code = chat(url, console=console, lines=io.StringIO(lines), **options)
    return code, shown.getvalue()


@pytest.mark.parametrize("body", ["<html>", "{}", '{"data": []}', '{"data": [3]}', "[]"])
def test_a_server_of_something_else_is_told(body: str) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with (
        httpx.Client(transport=answer, base_url="http://x/v1") as client,
        pytest.raises(ChatError, match="lists no model"),
    ):
        first_model(client)


def test_turns_and_commands(model: ServedModel) -> None:
    script = (
        "/system Be brief.\n/temp 0.5\n/temp x\n2 + 2?\n\nAnd"
        " more?\n/clear\n/help\n/nothing\nAgain?\n/quit\nno\n"
    )
    with serving(model, spell(model, TEXT)) as it:
        code, shown = talk(it.url, script)
        asked = [
            model.vocabulary.decode(generation.prompt) for generation in it.world.units.submitted
        ]
        temperatures = {generation.sampling.temperature for generation in it.world.units.submitted}
    assert code == 0
    assert shown.count("Easy.") == shown.count("Four [bold]is[/bold] it.") == 3
    assert shown.count("tokens/s") == 3
    for said in (
        "temperature 0.5",
        "use a number from 0 to 2",
        "forgotten",
        "/clear ",
        "/nothing: unknown command",
    ):
        assert said in shown
    assert len(asked) == 3
    assert all("Be brief." in prompt for prompt in asked)
    assert "Four" in asked[1]
    assert "Easy" not in asked[1]  # Thinking is not sent again.
    assert "Four" not in asked[2]
    assert temperatures == {0.5}


def test_refusals(model: ServedModel) -> None:
    with serving(model, spell(model, TEXT), keys=("k",)) as it:
        assert talk(it.url, "hi\n") == (
            1,
            "hadal chat: 401: the server needs a valid API key: set --api-key or HADAL_API_KEY.\n",
        )
        assert talk(f"{it.url}/v1/", "hi\n", api_key="k")[0] == 0
        code, shown = talk(it.url, "hi\n", api_key="k", model="other")
        assert code == 1
        assert "error: 404: The model 'other' does not exist" in shown
        url = it.url
    code, shown = talk(url, "hi\n")
    assert code == 1
    assert "Start one with `hadal serve`" in shown


def test_ctrl_c_stops_the_answer_only(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model, spell(model, "</think>abc ", then_stop=False), step_s=0.002) as it:
        shown = io.StringIO()
        with httpx.Client(base_url=f"{it.url}/v1", timeout=10) as client:
            talking = Chat(client, Console(file=shown, width=200), "small", max_tokens=4000)
            show = Chat._show
            num_shown = 0

            def interrupt(self: Chat, delta: dict[str, Any], turn: Any) -> None:
                nonlocal num_shown
                show(self, delta, turn)
                num_shown += 1
                if num_shown == 20:
                    raise KeyboardInterrupt

            monkeypatch.setattr(Chat, "_show", interrupt)
            turn = talking.turn("hi")
            assert turn.stopped
            assert talking.history[-1] == {"role": "assistant", "content": turn.content}
            assert "stopped" in shown.getvalue()
        # `serving` waits at its end until the server has released the request.


def test_errors_in_the_stream() -> None:
    said = json.dumps({"choices": [{"delta": {"content": "four"}}]})
    whole = (
        f': keep-alive\n\ndata: {{"choices": []}}\n\ndata: {said}\n\ndata: [DONE]\n\ndata: {{\n\n'
    )
    broken = f"data: {json.dumps({'error': {'message': 'it broke', 'type': 'server_error'}})}\n\n"
    streams = iter([whole, broken])

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, text=next(streams), headers=headers)

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        talking = Chat(client, Console(file=io.StringIO()), "m")
        assert talking.turn("2 + 2?").content == "four"
        talking.history.clear()
        with pytest.raises(ChatError, match="it broke"):
            talking.turn("hi")
        assert talking.history == []
