"""The connector's half in vLLM's scheduler, without vLLM."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.core.types.packed import pack, prompt_hash
from headrace.integrations.vllm.planner import LoadPlanner
from headrace.peer.commands import CancelLoad, LoadKv, RejectTicket, RenewLease, TicketRef

PROMPT = list(range(100, 110))
HASH = prompt_hash(pack(PROMPT))
TICKET = TicketRef(name="t", host="127.0.0.1", port=7000)


def params(**changes: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "ticket": "t", "remote_host": "127.0.0.1", "remote_port": 7000, **changes}


@dataclass
class Request:
    """As much of vLLM's Request as is read."""

    request_id: str = "a"
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(PROMPT))
    kv_transfer_params: dict[str, Any] | None = field(default_factory=params)
    lora_request: Any = None
    mm_features: Any = field(default_factory=list)
    prompt_embeds: Any = None


def added(request: Request, planner: LoadPlanner | None = None) -> LoadPlanner:
    made = planner or LoadPlanner()
    made.added(request)
    return made


def test_the_way_of_a_load() -> None:
    request = Request()
    planner = added(request)
    assert planner.take_commands().commands == (RenewLease(id="a", ticket=TICKET),)
    for _ in range(3):  # asked as often as the scheduler likes
        assert planner.matched(request, 4) == (6, True)
    planner.allocated(request, (5, 6, 7), 6)
    step = planner.take_commands()
    assert step.commands == (LoadKv(id="a", ticket=TICKET, start=4, tokens=10, prompt_hash=HASH),)
    assert step.blocks == {"a": (5, 6, 7)}
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False
    planner.allocated(request, (5, 6, 7, 8), 0)  # vLLM calls again when the load is done
    planner.loaded({"a", "unknown"})
    assert planner.matched(request, 0) == (0, False), "a failed load is not tried again"
    planner.finished(request)
    assert planner.take_commands().commands == ()
    assert len(planner) == 0


@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": False, "ticket": "t"}, {"do_remote_decode": True}])
def test_requests_that_name_no_ticket_are_left_alone(given: dict[str, Any] | None) -> None:
    request = Request(kv_transfer_params=given)
    planner = added(request)
    assert planner.matched(request, 0) == (0, False)
    planner.allocated(request, (1,), 0)
    planner.finished(request)
    assert planner.take_commands().commands == ()


def test_a_request_that_ends_before_its_load_lets_the_ticket_go() -> None:
    planner = added(Request())
    planner.finished(Request())
    assert planner.take_commands().commands == (RenewLease(id="a", ticket=TICKET), CancelLoad(id="a"))


def test_a_request_that_ends_while_it_loads_cancels_the_load() -> None:
    request = Request()
    planner = added(request)
    planner.allocated(request, (1,), 10)
    planner.finished(request)
    planner.loaded({"a"})
    assert planner.take_commands().commands[-1] == CancelLoad(id="a")


def test_nothing_to_load_after_all() -> None:
    request = Request()
    planner = added(request)
    planner.allocated(request, (1,), 0)
    assert planner.take_commands().commands[-1] == CancelLoad(id="a")
    assert planner.matched(request, 0) == (0, False)
    planner.finished(request)
    assert planner.take_commands().commands == ()


def test_the_twin_of_a_client_that_left() -> None:
    """vLLM tells of a rejected request, or of a client that is gone, by a request of one token with the same params."""
    request, twin = Request(), Request("twin", [0], params())
    planner = added(request)
    planner.allocated(request, (1,), 10)
    planner.take_commands()
    planner.added(twin)
    planner.finished(twin)
    assert planner.take_commands().commands == (), "the load goes on"
    planner.finished(request)
    assert planner.take_commands().commands == (CancelLoad(id="a"),)
    planner.added(twin)
    planner.finished(twin)
    assert planner.take_commands().commands == (RenewLease(id="twin", ticket=TICKET), CancelLoad(id="twin"))


def test_requests_of_the_same_ticket_wait_for_the_first_and_load_nothing() -> None:
    first, second = Request("a"), Request("b")
    planner = added(second, added(first))
    assert planner.matched(first, 0) == (10, True)
    assert planner.matched(second, 0) == (None, False)
    planner.allocated(first, (1,), 10)
    assert planner.matched(second, 0) == (None, False)
    planner.loaded({"a"})
    assert planner.matched(second, 8) == (0, False)
    planner.allocated(second, (1,), 0)
    planner.finished(second)
    planner.finished(first)
    assert [type(command) for command in planner.take_commands().commands] == [RenewLease, LoadKv]


def test_the_others_go_on_when_the_first_ends_early() -> None:
    first, second = Request("a"), Request("b")
    planner = added(second, added(first))
    planner.finished(first)
    assert planner.matched(second, 0) == (0, False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ticket": 7}, "bad_kv_transfer_params"),
        ({"ticket": "x" * 257}, "bad_kv_transfer_params"),
        ({"ticket": None}, "bad_kv_transfer_params"),
        ({"remote_host": None}, "bad_kv_transfer_params"),
        ({"remote_host": "a b"}, "bad_kv_transfer_params"),
        ({"remote_port": "7000"}, "bad_kv_transfer_params"),
        ({"remote_port": 70000}, "bad_kv_transfer_params"),
        ({"remote_host": None, "remote_bootstrap_addr": "http://[::1"}, "bad_kv_transfer_params"),
        ({"remote_num_tokens": 11}, "prompt_mismatch"),
        ({"prompt_hashes": ["0" * 64]}, "prompt_mismatch"),
        ({"tickets": ["t", "u"], "prompt_hashes": [HASH]}, "prompt_mismatch"),
    ],
    ids=str,
)
def test_what_must_not_be_loaded_fails_as_vllm_is_configured(changes: dict[str, Any], code: str) -> None:
    request = Request(kv_transfer_params=params(**changes))
    planner = added(request)
    assert planner.matched(request, 0) == (10, True)
    planner.allocated(request, (1,), 10)
    rejected = planner.take_commands().commands[-1]
    assert isinstance(rejected, RejectTicket)
    assert (rejected.id, rejected.code) == ("a", code)
    assert rejected.message


@pytest.mark.parametrize(
    "changes", [{"lora_request": "an adapter"}, {"mm_features": ["an image"]}, {"prompt_embeds": "a tensor"}], ids=str
)
def test_kv_that_does_not_follow_from_token_ids_is_not_loaded(changes: dict[str, Any]) -> None:
    request = Request(**changes)
    planner = added(request)
    planner.allocated(request, (1,), 10)
    rejected = planner.take_commands().commands[-1]
    assert isinstance(rejected, RejectTicket)
    assert rejected.code == "not_supported"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"remote_num_tokens": 10}, {"wait": False}),
        ({"remote_num_tokens": 10, "wait": True}, {"wait": True}),
        ({"remote_host": "LOCALHOST."}, {"host": "localhost"}),
        ({"fingerprint": "f", "other": [1]}, {"fingerprint": "f"}),
        ({"ticket": None, "transfer_id": "t"}, {}),
        ({"remote_host": None, "remote_bootstrap_addr": "http://[::1]:81"}, {"host": "::1", "port": 81, "http": True}),
        ({"remote_host": None, "remote_bootstrap_addr": "h"}, {"host": "h", "port": 8998, "http": True}),
        ({"tickets": ["u", "t"], "prompt_hashes": ["0" * 64, HASH], "remote_num_tokens": [3, 10]}, {"wait": False}),
    ],
    ids=str,
)
def test_the_ways_to_name_a_ticket(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    planner = added(Request(kv_transfer_params=params(**changes)))
    fields = {"name": "t", "host": "127.0.0.1", "port": 7000, **expected}
    assert planner.take_commands().commands == (RenewLease(id="a", ticket=TicketRef(**fields)),)
