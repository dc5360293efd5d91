"""The registry of external stages: which processes are admitted, wait, are refused, or are told to exit."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.membership import (
    AnyJoinReply,
    GroupEnded,
    JoinAccepted,
    JoinPending,
    JoinRefused,
    JoinRequest,
)
from headrace.core.messages.orders import stage_identity
from headrace.core.messages.stage_events import StageFailed
from headrace.core.types.ranks.layout import Layout
from headrace.server.stage_group.registry import StageRegistry

TEMPLATE = StageConfig(
    rank=0,
    layout=Layout(pp=2),
    endpoint="",
    model=ModelConfig(model="m"),
    engine=EngineConfig(pp_layers=(3, 5)),
    transfer=TransferConfig(peer_timeout_s=2.0),
)


def make_registry(template: StageConfig = TEMPLATE, key: str = "", control_host: str | None = None) -> StageRegistry:
    sessions = map("session-{}".format, itertools.count(1))
    return StageRegistry(
        template,
        key=key,
        version="1",
        endpoint="tcp://here:1",
        control_host=control_host,
        new_session=lambda: next(sessions),
    )


def join(rank: int, incarnation: str = "", **changes: object) -> JoinRequest:
    incarnation = incarnation or f"process-{rank}"
    request = JoinRequest(rank=rank, world_size=2, incarnation=incarnation, version="1", host=f"10.0.0.{rank}")
    return replace(request, **changes)


def reply_to(registry: StageRegistry, route: bytes, request: JoinRequest) -> AnyJoinReply:
    """The reply to a JoinRequest."""
    replies = registry.join(route, request)
    assert replies[0][0] == route
    return replies[0][1]


def complete(registry: StageRegistry) -> dict[bytes, AnyJoinReply]:
    registry.join(b"a", join(0))
    return dict(registry.join(b"b", join(1)))


def test_all_ranks_are_admitted_when_the_last_one_joins_with_their_configuration() -> None:
    registry = make_registry(replace(TEMPLATE, transfer=TransferConfig(data_port=7000)))
    assert registry.status() == "waiting for stages 0 and 1 of 2 to join at tcp://here:1"
    assert registry.identities() == {}
    assert reply_to(registry, b"b", join(1, data_port=9000)) == JoinPending(message="waiting for stage 0 of 2")
    assert registry.status() == "waiting for stage 0 of 2 to join at tcp://here:1"
    replies = dict(registry.join(b"a", join(0)))
    first, second = (replies[route] for route in (b"a", b"b"))
    assert isinstance(first, JoinAccepted)
    assert isinstance(second, JoinAccepted)
    assert (first.config.rank, second.config.rank) == (0, 1)
    assert (
        (first.config.epoch, first.config.session) == (second.config.epoch, second.config.session) == (1, "session-1")
    )
    assert (first.config.transfer.host, first.config.transfer.data_port) == ("10.0.0.0", 7000)
    assert (second.config.transfer.host, second.config.transfer.data_port) == ("10.0.0.1", 9000), "its own goes first"
    assert first.config.engine.pp_layers == (3, 5)
    assert registry.identities() == {stage_identity(rank, 1, "session-1"): rank for rank in (0, 1)}
    assert reply_to(registry, b"b2", join(1, data_port=9000)) == second, "a repeated JoinRequest over a new connection"
    assert dict(registry.replies()) == {b"a": first, b"b2": second}


def test_data_ports_are_consecutive_by_rank() -> None:
    registry = make_registry(replace(TEMPLATE, transfer=TransferConfig(data_port=7000)))
    replies = [reply for reply in complete(registry).values() if isinstance(reply, JoinAccepted)]
    assert {reply.config.transfer.data_port for reply in replies} == {7000, 7001}


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (join(0, key="sesam"), "wrong_key", ["HEADRACE_STAGE_KEY"]),
        (join(0), "wrong_key", ["HEADRACE_STAGE_KEY"]),
        (join(0, key="sesame", version="2"), "wrong_version", ["2", "1"]),
        (join(0, key="sesame", world_size=3), "wrong_world_size", ["world size is 3", "--pp 2"]),
        (join(2, key="sesame"), "wrong_rank", ["rank 2", "0 to 1"]),
        (join(-1, key="sesame"), "wrong_rank", ["rank -1"]),
        (join(0, key="sesame", host="127.0.0.1"), "unreachable_host", ["127.0.0.1", "--transfer-host"]),
        (join(0, key="sesame", host="0.0.0.0"), "unreachable_host", ["0.0.0.0", "--transfer-host"]),
        (join(0, key="sesame", host="::"), "unreachable_host", ["::", "--transfer-host"]),
    ],
)
def test_mistakes_are_refused_and_named(message: JoinRequest, code: str, words: list[str]) -> None:
    registry = make_registry(key="sesame", control_host="10.0.0.9")
    before = registry.status()
    reply = reply_to(registry, b"a", message)
    assert isinstance(reply, JoinRefused)
    assert reply.code == code
    assert all(word in reply.message for word in words), reply.message
    assert "sesame" not in reply.message
    assert registry.status() == before, "a refused process is not registered"
    assert isinstance(reply_to(registry, b"a", join(0, key="sesame")), JoinPending)


def test_any_host_is_accepted_where_no_decode_server_fetches() -> None:
    registry = make_registry()
    assert isinstance(reply_to(registry, b"a", join(0, host="127.0.0.1")), JoinPending)
    control_here = make_registry(control_host="127.0.0.1")
    assert isinstance(reply_to(control_here, b"a", join(0, host="127.0.0.2")), JoinPending), (
        "on the control endpoint's own machine"
    )


def test_a_rank_has_one_process_at_a_time() -> None:
    registry = make_registry()
    registry.join(b"a", join(0))
    second = reply_to(registry, b"c", join(0, "other", host="10.0.0.7"))
    assert isinstance(second, JoinPending)
    assert "10.0.0.0" in second.message, "names the process that has this rank"
    assert registry.connection_lost(b"a") == [], "no group is admitted yet"
    assert reply_to(registry, b"c", join(0, "other")) == JoinPending(message="waiting for stage 1 of 2")
    assert isinstance(reply_to(registry, b"b", join(1)), JoinAccepted)
    assert isinstance(reply_to(registry, b"a", join(0)), JoinPending), "another process has its rank now"


def test_a_lost_member_fails_the_group_and_the_next_group_has_a_new_session() -> None:
    registry = make_registry()
    complete(registry)
    assert registry.connection_lost(b"unknown") == []
    assert registry.connection_lost(b"b") == [
        StageFailed(stage=1, message="its process has ended, or its machine cannot be reached")
    ]
    newcomer = join(1, "new")
    assert isinstance(reply_to(registry, b"c", newcomer), JoinPending), "the scheduler has not ended the group yet"
    replies = registry.end_group("stage 1 failed: gone")
    assert replies == [(route, GroupEnded(message="stage 1 failed: gone")) for route in (b"a", b"b")]
    assert registry.identities() == {}
    assert registry.status() == "stage 1 failed: gone; waiting for stages 0 and 1 of 2 to join at tcp://here:1"
    assert isinstance(reply_to(registry, b"c", newcomer), JoinPending)
    late = reply_to(registry, b"a", join(0, session="session-1"))
    assert late == GroupEnded(message="stage 1 failed: gone"), "it did not receive the first GroupEnded"
    assert registry.end_group("again") == [], "there is no group"
    reply = reply_to(registry, b"d", join(0, "new-0"))
    assert isinstance(reply, JoinAccepted)
    assert (reply.config.epoch, reply.config.session) == (2, "session-2")
    assert reply_to(registry, b"a", join(0, session="session-1")) == GroupEnded(message="stage 1 failed: gone")
    assert isinstance(reply_to(registry, b"d", join(0, "new-0", session="session-2")), JoinAccepted), (
        "the new group is not affected"
    )


def test_a_process_that_received_an_old_admission_after_joining_the_next_group_is_removed() -> None:
    registry = make_registry()
    complete(registry)
    registry.end_group("over")
    assert isinstance(reply_to(registry, b"a", join(0)), JoinPending), "its JoinAccepted has not arrived yet"
    assert isinstance(reply_to(registry, b"a", join(0, session="session-1")), GroupEnded)
    assert isinstance(reply_to(registry, b"a", join(0, "new")), JoinPending)
    assert isinstance(reply_to(registry, b"b", join(1, "new")), JoinAccepted), "its rank was free for another process"


def test_a_restarted_scheduler_ends_the_membership_of_old_stages() -> None:
    reply = reply_to(make_registry(), b"a", join(0, session="of-an-earlier-scheduler"))
    assert isinstance(reply, GroupEnded)
    assert "started after" in reply.message


class RandomJoins(RuleBasedStateMachine):
    """Processes start, join, receive replies and exit in any order. Of the processes that believe to be members of the
    current group, each has a rank of its own, and no process is ever in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = make_registry()
        self.numbers = itertools.count()
        self.processes: dict[str, JoinRequest] = {}
        self.sessions: dict[str, set[str]] = {}

    @rule(rank=st.integers(0, 1))
    def start(self, rank: int) -> None:
        name = f"p{next(self.numbers)}"
        self.processes[name] = join(rank, name)
        self.sessions[name] = set()

    @rule(data=st.data())
    def send_join(self, data: st.DataObject) -> None:
        if self.processes:
            name = data.draw(st.sampled_from(sorted(self.processes)))
            for route, reply in self.registry.join(name.encode(), self.processes[name]):
                self.receive(route.decode(), reply)

    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        if self.processes:
            name = data.draw(st.sampled_from(sorted(self.processes)))
            del self.processes[name]
            for failed in self.registry.connection_lost(name.encode()):
                self.end_group(f"{failed.stage}")

    @rule()
    def end_group(self, reason: str = "failed") -> None:
        for route, reply in self.registry.end_group(reason):
            self.receive(route.decode(), reply)

    def receive(self, name: str, reply: AnyJoinReply) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        assert not isinstance(reply, JoinRefused)
        if isinstance(reply, GroupEnded):
            del self.processes[name]
        elif isinstance(reply, JoinAccepted):
            assert reply.config.rank == process.rank
            self.sessions[name].add(reply.config.session)
            self.processes[name] = replace(process, session=reply.config.session)

    @invariant()
    def one_process_per_rank_and_one_group_per_process(self) -> None:
        assert all(len(sessions) <= 1 for sessions in self.sessions.values())
        group = [process for process in self.processes.values() if process.session == self.registry.session != ""]
        assert len({process.rank for process in group}) == len(group)
        assert len(self.registry.identities()) in (0, 2)


RandomJoins.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomJoins = RandomJoins.TestCase


def test_with_tensor_parallelism_the_world_has_a_rank_for_each_shard() -> None:
    registry = make_registry(replace(TEMPLATE, layout=Layout(pp=2, tp=2)))
    [(_, refused)] = registry.join(b"x", join(0, world_size=2))
    assert isinstance(refused, JoinRefused)
    assert "world size is 2 and the server was started with --pp 2, --dp 1, --tp 2: 4 ranks" in refused.message
    for rank in (0, 1, 2):
        registry.join(b"%d" % rank, join(rank, world_size=4))
    assert registry.status() == "waiting for rank 3 of 4 to join at tcp://here:1"
    replies = dict(registry.join(b"3", join(3, world_size=4)))
    accepted = replies[b"2"]
    assert isinstance(accepted, JoinAccepted)
    assert (accepted.config.rank, accepted.config.layout) == (2, Layout(pp=2, tp=2))
    assert accepted.config.name == "rank 2 (stage 1, replica 0, shard 0)"
    assert registry.status() == "all 4 ranks have joined and are loading"
