"""Body of /batches, and the endpoints that a batch may name."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hadal.gateway.api.decoding import NO_SCHEMA

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Endpoints for the requests of a batch."""
BATCH_WINDOW = "24h"


class NewBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": [*BATCH_ENDPOINTS]})]
    completion_window: Annotated[str, Meta(extra_json_schema={"enum": [BATCH_WINDOW]})]
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw = NO_SCHEMA
    """Not supported: any value but null is refused."""
