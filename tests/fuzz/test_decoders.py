"""Every decoder of bytes from outside: it returns a message, or raises what it says it raises."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import minimal_peer
from headrace.core.messages.membership import AnyJoinReply, JoinRequest
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.server.api.request.parse import parse_body
from headrace.server.api.request.schema import ChatBody, CompletionBody, PrefillBody
from headrace.server.upstream.prefill_call import response_error
from headrace.transfer.protocol import draft_frame, metadata
from headrace.transfer.sockets.curve_keys import key_text, read_pair, read_public
from tests.fuzz.mutations import CLAIMS, NESTED, NO_TEXT, VALID, Mutator, spoilt
from tests.transfer.examples import ANSWER, CONTROL, DRAFT_FRAME, PEER, ROW, STAGE, TICKET

JOINS: Codec[JoinRequest] = Codec(JoinRequest)
JOIN_REPLIES: Codec[AnyJoinReply] = Codec(AnyJoinReply)
CODECS: tuple[Codec[Any], ...] = (PEER, CONTROL, ANSWER, STAGE, JOINS, JOIN_REPLIES)
EFFORTS = [pytest.param(150, id="short"), pytest.param(5_000, id="long", marks=pytest.mark.full)]


def tried(examples: int, data: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Run a property with this many examples."""
    settings(max_examples=examples, deadline=None, database=None)(given(data)(check))()


def decoded(codec: Codec[Any], data: bytes) -> None:
    """A message that is decoded is one: encoded again it means the same."""
    with suppress(DecodeError):
        message = codec.decode(data)
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("examples", EFFORTS)
@pytest.mark.parametrize("codec", CODECS)
def test_messages(codec: Codec[Any], examples: int) -> None:
    for data in (NESTED, NO_TEXT, *CLAIMS):
        decoded(codec, data)
    tried(examples, spoilt(), lambda data: decoded(codec, data))


@pytest.mark.parametrize("data", [NESTED, NO_TEXT, *CLAIMS])
def test_what_is_too_deep_or_no_text_is_no_message(data: bytes) -> None:
    for codec in CODECS:
        with pytest.raises(DecodeError):
            codec.decode(data)


@pytest.mark.parametrize("examples", EFFORTS)
def test_metadata_rows(examples: int) -> None:
    def check(row: bytes) -> None:
        with suppress(ValueError):
            found = metadata.decode(row)
            assert found.first.token >= 0
            assert len(found.first.logprob.top_ids if found.first.logprob else ()) <= metadata.MAX_TOP

    tried(examples, st.binary(max_size=300) | st.integers(0).map(lambda seed: Mutator(seed).spoil(ROW)), check)


@pytest.mark.parametrize("examples", EFFORTS)
def test_draft_frames(examples: int) -> None:
    def check(frame: bytes) -> None:
        with suppress(ValueError):
            assert draft_frame.encode(TICKET, 2, draft_frame.decode(frame, TICKET, 2))[:2] == frame[:2]

    tried(examples, st.binary(max_size=300) | st.integers(0).map(lambda seed: Mutator(seed).spoil(DRAFT_FRAME)), check)


@pytest.mark.parametrize("examples", EFFORTS)
def test_the_minimal_peer(examples: int) -> None:
    def check(data: bytes) -> None:
        assert "type" in minimal_peer.decode(data)

    check(NESTED)
    tried(examples, spoilt(), check)


BODIES = (
    b'{"prompt": "Why?", "ticket": "t", "max_tokens": 8, "stream": true, "stop": ["a"], "temperature": 0.5}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": true, "n": 1}',
    b'{"prompt_token_ids": [1, 2, 3], "handoff": "hold", "priority": 1e400, "rid": "r"}',
    b"[" * 100_000,
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
)


@pytest.mark.parametrize("examples", EFFORTS)
@pytest.mark.parametrize("kind", [PrefillBody, CompletionBody, ChatBody])
def test_request_bodies(kind: type[msgspec.Struct], examples: int) -> None:
    def check(data: bytes) -> None:
        with suppress(HeadraceError):
            parse_body(data, kind)

    for body in BODIES:
        check(body)
    tried(examples, spoilt(BODIES[:3]), check)


@given(st.integers(100, 599), spoilt((b'{"error": {"message": "m", "code": "c", "param": "p"}}',)), st.text(max_size=9))
@example(500, b'{"error": {"message": "\xff"}}', "\u00b2")
@example(503, b"[" * 100_000, "9" * 400)
def test_error_answers_of_a_prefill_server(status: int, content: bytes, retry: str) -> None:
    headers: Any = {"Retry-After": retry}
    info = response_error(status, content, headers)
    assert 400 <= info.status <= 599
    assert (info.retry_after_s or 0) < 1e6


@settings(max_examples=60, deadline=None)
@given(spoilt((key_text("a" * 40, "b" * 40).encode(), key_text("a" * 40).encode())))
def test_key_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzzed.key"
    path.write_bytes(data)
    path.chmod(0o600)
    for read in (read_public, read_pair):
        with suppress(ConfigError):
            assert read(path)


def test_valid_messages_are_decoded_by_at_least_one_codec() -> None:
    """Otherwise what is spoilt here would be rubbish from the start."""
    for data in VALID:
        found = 0
        for codec in CODECS:
            with suppress(DecodeError):
                codec.decode(data)
                found += 1
        assert found
