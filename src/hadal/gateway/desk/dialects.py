"""Dialects: the APIs for generations. Each turns bodies into work and formats replies.

A folder of gateway/api reads a dialect's bodies and writes its replies; a class here connects them
to the service. A new dialect needs both, and a line in `dialects_of`. Independent of routes and
sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from hadal.gateway.api.description import CHAT, COMPLETION, MESSAGES, RESPONSES, Operation
from hadal.gateway.api.messages.refusals import in_anthropics_words
from hadal.gateway.api.messages.reply import MessagesFormatter
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.api.openai.reply import ChatFormatter, CompletionFormatter
from hadal.gateway.api.responses.items import listed
from hadal.gateway.api.responses.reply import ResponseFormatter
from hadal.gateway.api.responses.request import (
    ResponseAsk,
    ResponsesRequest,
    items_in,
    parse_response,
    read_response,
    references_of,
)
from hadal.gateway.api.responses.tools import OfferedTools
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.desk import Formatter
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.kept import Responses
from hadal.gateway.desk.service import Service, Work
from hadal.gateway.text.asks import Turn

W = TypeVar("W", bound=Work)


class Dialect(Protocol[W]):
    """One API of generations."""

    name: str
    """Label of the dialect's requests in the metrics."""
    paths: tuple[str, ...]
    """Paths of the endpoint; /openapi.json lists only the first."""
    id_prefix: str
    """Prefix of reply ids."""

    async def parse(self, body: bytes, reply_id: str, tenant: Tenant) -> W:
        """Return the work that a body asks for. Raises RequestError, ApiError."""
        ...

    def format(self, work: W) -> Formatter:
        """Return the maker of the format in which the work's reply is written."""
        ...

    def describe(self) -> Operation:
        """Return the endpoint's description for /openapi.json."""
        ...


class ChatDialect:
    """OpenAI's /chat/completions."""

    name = "chat"
    paths: tuple[str, ...] = ("/v1/chat/completions", "/chat/completions", "/beta/chat/completions")
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service) -> None:
        self._service = service

    async def parse(self, body: bytes, reply_id: str, tenant: Tenant) -> Work:
        return await self._service.chat(body, reply_id, tenant)

    def format(self, work: Work) -> Formatter:
        return ChatFormatter

    def describe(self) -> Operation:
        return CHAT


class CompletionDialect:
    """OpenAI's /completions."""

    name = "completions"
    paths: tuple[str, ...] = ("/v1/completions", "/completions", "/beta/completions")
    id_prefix = "cmpl-"

    def __init__(self, service: Service) -> None:
        self._service = service

    async def parse(self, body: bytes, reply_id: str, tenant: Tenant) -> Work:
        return await self._service.completion(body, reply_id, tenant)

    def format(self, work: Work) -> Formatter:
        return CompletionFormatter

    def describe(self) -> Operation:
        return COMPLETION


class MessagesDialect:
    """Anthropic's /messages."""

    name = "messages"
    paths: tuple[str, ...] = ("/v1/messages", "/messages", "/anthropic/v1/messages")
    id_prefix = "msg_"

    def __init__(self, service: Service, unasked_thinking: str) -> None:
        self._service = service
        self._parse = partial(parse_messages, unasked=unasked_thinking)

    async def parse(self, body: bytes, reply_id: str, tenant: Tenant) -> Work:
        with in_anthropics_words():
            return await self._service.chat(body, reply_id, tenant, self._parse)

    def format(self, work: Work) -> Formatter:
        return partial(
            MessagesFormatter,
            max_tokens=work.ask.max_tokens or 0,
            context_tokens=self._service.model.context_tokens,
            hides_reasoning=work.ask.hides_reasoning,
            edits=work.edits,
        )

    def describe(self) -> Operation:
        return MESSAGES


@dataclass(frozen=True)
class ResponseWork(Work):
    """Work for /responses, with the request, because the reply repeats its fields."""

    asked: ResponsesRequest
    keep: Callable[[bytes, Turn], None] | None
    """Function that stores the finished response; None if it is not to be stored."""
    tools: OfferedTools


class ResponsesDialect:
    """OpenAI's /responses."""

    name = "responses"
    paths: tuple[str, ...] = ("/v1/responses", "/responses")

    def __init__(
        self,
        service: Service,
        responses: Responses,
        unix_time: Callable[[], float],
        count_unreadable: Callable[[int], None],
    ) -> None:
        """`count_unreadable` counts texts that another server encrypted."""
        self.id_prefix = responses.id_prefix
        self._service = service
        self._responses = responses
        self._unix_time = unix_time
        self._count_unreadable = count_unreadable

    async def parse(self, body: bytes, reply_id: str, tenant: Tenant) -> ResponseWork:
        service, responses = self._service, self._responses

        def read() -> tuple[ResponsesRequest, list[str]]:
            request = read_response(body)
            return request, references_of(request)

        def resolve() -> tuple[ResponseAsk, bytes]:
            known = items_in(bodies, ids, service.limits.max_body_bytes)
            asked = parse_response(request, known, before.tools)
            return asked, msgspec.json.encode(listed(asked.request.input))

        request, ids = await service.off_loop(tenant, read, len(body))
        bodies = await responses.bodies_with(tenant.name, ids) if ids else []
        before = await responses.before(tenant.name, request.previous_response_id)
        num_named = sum(map(len, bodies))
        asked, items = await service.off_loop(tenant, resolve, len(body) + num_named)
        self._count_unreadable(asked.read.num_unreadable)
        turns = before.turns
        num_before = sum(turn.num_chars for turn in turns) + num_named
        work = await service.chat(body, reply_id, tenant, lambda _: asked.after(turns), num_before)
        keep = responses.keeper(tenant.name, reply_id, before, asked, items)
        return ResponseWork(
            work.ask, work.choices, work.num_prompt_tokens, asked.request, keep, asked.tools
        )

    def format(self, work: ResponseWork) -> Formatter:
        return partial(
            ResponseFormatter,
            asked=work.asked,
            keep=work.keep,
            sampling=work.choices[0].generation.sampling,
            now=self._unix_time,
            tools=work.tools,
        )

    def describe(self) -> Operation:
        return RESPONSES


def dialects_of(gateway: Gateway) -> list[Dialect[Any]]:
    """Return the dialects that a gateway serves."""
    service = gateway.service
    return [
        ChatDialect(service),
        CompletionDialect(service),
        MessagesDialect(service, gateway.deployment.gateway.unasked_thinking),
        ResponsesDialect(
            service,
            gateway.responses,
            gateway.clock.unix_time,
            gateway.metrics.unreadable.inc,
        ),
    ]
