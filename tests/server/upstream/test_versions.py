"""Prefill servers of other releases, whose answers have more fields, or fewer."""

import json

import httpx
import msgspec
import pytest

from headrace.server.upstream.discovery_client import Discovery
from headrace.server.upstream.prefill_call import PrefillResponse, response_error

LATER = {"colour": "blue", "shape": {"sides": [3, 4]}}


@pytest.mark.parametrize("more", [{}, LATER])
def test_discovery(more: dict[str, object]) -> None:
    sent = {"protocol": [1], "instance": "i", "control_port": 8100, **more}
    assert msgspec.json.decode(json.dumps(sent), type=Discovery) == Discovery((1,), "i", 8100)


@pytest.mark.parametrize("more", [{}, LATER])
def test_responses_and_errors(more: dict[str, object]) -> None:
    assert msgspec.json.decode(json.dumps(more), type=PrefillResponse) == PrefillResponse()
    error = {"error": {"message": "full", "code": "queue_full", **more}, **more}
    found = response_error(429, json.dumps(error).encode(), httpx.Headers())
    assert (found.status, found.code, found.message) == (429, "queue_full", "full")
