"""Stages that join: who is admitted, who waits, who is refused, who is told to end."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.membership import Admitted, AnswerMessage, Dismissed, JoinRequest, Refused, Waiting
from headrace.core.messages.orders import stage_identity
from headrace.core.messages.stage_events import StageFailed
from headrace.server.stage_group.registry import StageRegistry

TEMPLATE = StageConfig(
    stage=0,
    stages=2,
    endpoint="",
    model=ModelConfig(model="m"),
    engine=EngineConfig(pp_layers=(3, 5)),
    transfer=TransferConfig(peer_timeout_s=2.0),
)


def roster(template: StageConfig = TEMPLATE, key: str = "", control_host: str | None = None) -> StageRegistry:
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
    made = JoinRequest(rank=rank, world_size=2, incarnation=incarnation, version="1", host=f"10.0.0.{rank}")
    return replace(made, **changes)


def said(made: StageRegistry, route: bytes, message: JoinRequest) -> AnswerMessage:
    """The answer to a JoinRequest."""
    replies = made.receive(route, message)
    assert replies[0][0] == route
    return replies[0][1]


def complete(made: StageRegistry) -> dict[bytes, AnswerMessage]:
    made.receive(b"a", join(0))
    return dict(made.receive(b"b", join(1)))


def test_all_are_admitted_when_the_last_one_joins_and_told_everything() -> None:
    made = roster(replace(TEMPLATE, transfer=TransferConfig(data_port=7000)))
    assert made.status() == "waiting for stages 0 and 1 of 2 to join at tcp://here:1"
    assert made.identities() == {}
    assert said(made, b"b", join(1, data_port=9000)) == Waiting(message="waiting for stage 0 of 2")
    assert made.status() == "waiting for stage 0 of 2 to join at tcp://here:1"
    answers = dict(made.receive(b"a", join(0)))
    first, second = (answers[route] for route in (b"a", b"b"))
    assert isinstance(first, Admitted)
    assert isinstance(second, Admitted)
    assert (first.config.stage, second.config.stage) == (0, 1)
    assert (
        (first.config.epoch, first.config.session) == (second.config.epoch, second.config.session) == (1, "session-1")
    )
    assert (first.config.transfer.host, first.config.transfer.data_port) == ("10.0.0.0", 7000)
    assert (second.config.transfer.host, second.config.transfer.data_port) == ("10.0.0.1", 9000), "its own goes first"
    assert first.config.engine.pp_layers == (3, 5)
    assert made.identities() == {stage_identity(rank, 1, "session-1"): rank for rank in (0, 1)}
    assert said(made, b"b2", join(1, data_port=9000)) == second, "a repeated Join, on a connection made anew"
    assert dict(made.answers()) == {b"a": first, b"b2": second}


def test_data_ports_of_stages_on_one_machine_follow_each_other() -> None:
    made = roster(replace(TEMPLATE, transfer=TransferConfig(data_port=7000)))
    answers = [answer for answer in complete(made).values() if isinstance(answer, Admitted)]
    assert {answer.config.transfer.data_port for answer in answers} == {7000, 7001}


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (join(0, key="sesam"), "wrong_key", ["HEADRACE_STAGE_KEY"]),
        (join(0), "wrong_key", ["HEADRACE_STAGE_KEY"]),
        (join(0, key="sesame", version="2"), "wrong_version", ["2", "1"]),
        (join(0, key="sesame", world_size=3), "wrong_world_size", ["one of 3", "--pp 2"]),
        (join(2, key="sesame"), "wrong_rank", ["rank 2", "0 to 1"]),
        (join(-1, key="sesame"), "wrong_rank", ["rank -1"]),
        (join(0, key="sesame", host="127.0.0.1"), "unreachable_host", ["127.0.0.1", "--transfer-host"]),
        (join(0, key="sesame", host="0.0.0.0"), "unreachable_host", ["0.0.0.0", "--transfer-host"]),
        (join(0, key="sesame", host="::"), "unreachable_host", ["::", "--transfer-host"]),
    ],
)
def test_mistakes_are_refused_and_named(message: JoinRequest, code: str, words: list[str]) -> None:
    made = roster(key="sesame", control_host="10.0.0.9")
    before = made.status()
    answer = said(made, b"a", message)
    assert isinstance(answer, Refused)
    assert answer.code == code
    assert all(word in answer.message for word in words), answer.message
    assert "sesame" not in answer.message
    assert made.status() == before, "who is refused takes no place"
    assert isinstance(said(made, b"a", join(0, key="sesame")), Waiting)


def test_where_no_decode_server_fetches_any_host_will_do() -> None:
    made = roster()
    assert isinstance(said(made, b"a", join(0, host="127.0.0.1")), Waiting)
    control_here = roster(control_host="127.0.0.1")
    assert isinstance(said(control_here, b"a", join(0, host="127.0.0.2")), Waiting), (
        "on the control endpoint's own machine"
    )


def test_a_rank_has_one_process_at_a_time() -> None:
    made = roster()
    made.receive(b"a", join(0))
    second = said(made, b"c", join(0, "other", host="10.0.0.7"))
    assert isinstance(second, Waiting)
    assert "10.0.0.0" in second.message, "says who is in its place"
    assert made.lose(b"a") == [], "nobody depends on it yet"
    assert said(made, b"c", join(0, "other")) == Waiting(message="waiting for stage 1 of 2")
    assert isinstance(said(made, b"b", join(1)), Admitted)
    assert isinstance(said(made, b"a", join(0)), Waiting), "it lost its place"


def test_a_member_that_is_gone_ends_the_group_and_the_next_one_has_nothing_of_it() -> None:
    made = roster()
    complete(made)
    assert made.lose(b"nobody") == []
    assert made.lose(b"b") == [StageFailed(stage=1, message="its process has ended, or its machine cannot be reached")]
    newcomer = join(1, "new")
    assert isinstance(said(made, b"c", newcomer), Waiting), "the scheduler has not given the group up yet"
    replies = made.dismiss("stage 1 failed: gone")
    assert replies == [(route, Dismissed(message="stage 1 failed: gone")) for route in (b"a", b"b")]
    assert made.identities() == {}
    assert made.status() == "stage 1 failed: gone; waiting for stages 0 and 1 of 2 to join at tcp://here:1"
    assert isinstance(said(made, b"c", newcomer), Waiting)
    late = said(made, b"a", join(0, session="session-1"))
    assert late == Dismissed(message="stage 1 failed: gone"), "it did not hear it the first time"
    assert made.dismiss("again") == [], "there is no group"
    answer = said(made, b"d", join(0, "new-0"))
    assert isinstance(answer, Admitted)
    assert (answer.config.epoch, answer.config.session) == (2, "session-2")
    assert said(made, b"a", join(0, session="session-1")) == Dismissed(message="stage 1 failed: gone")
    assert isinstance(said(made, b"d", join(0, "new-0", session="session-2")), Admitted), "the group stands"


def test_a_process_that_was_told_of_the_ended_group_after_it_joined_the_next_has_to_go() -> None:
    made = roster()
    complete(made)
    made.dismiss("over")
    assert isinstance(said(made, b"a", join(0)), Waiting), "its Admitted is still on its way"
    assert isinstance(said(made, b"a", join(0, session="session-1")), Dismissed)
    assert isinstance(said(made, b"a", join(0, "new")), Waiting)
    assert isinstance(said(made, b"b", join(1, "new")), Admitted), "its place was free for another process"


def test_a_scheduler_that_has_restarted_sends_the_old_stages_away() -> None:
    answer = said(roster(), b"a", join(0, session="of-another-life"))
    assert isinstance(answer, Dismissed)
    assert "started after" in answer.message


class Gatherings(RuleBasedStateMachine):
    """Processes come, speak, hear, and go in any order. Whoever believes to be in the group that stands has its rank
    to itself, and no process is ever in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = roster()
        self.numbers = itertools.count()
        self.processes: dict[str, JoinRequest] = {}
        self.heard: dict[str, set[str]] = {}

    @rule(rank=st.integers(0, 1))
    def start(self, rank: int) -> None:
        name = f"p{next(self.numbers)}"
        self.processes[name] = join(rank, name)
        self.heard[name] = set()

    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        if self.processes:
            name = data.draw(st.sampled_from(sorted(self.processes)))
            for route, answer in self.roster.receive(name.encode(), self.processes[name]):
                self.hear(route.decode(), answer)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if self.processes:
            name = data.draw(st.sampled_from(sorted(self.processes)))
            del self.processes[name]
            for failed in self.roster.lose(name.encode()):
                self.end(f"{failed.stage}")

    @rule()
    def end(self, reason: str = "given up") -> None:
        for route, answer in self.roster.dismiss(reason):
            self.hear(route.decode(), answer)

    def hear(self, name: str, answer: AnswerMessage) -> None:
        process = self.processes.get(name)
        if process is None:
            return
        assert not isinstance(answer, Refused)
        if isinstance(answer, Dismissed):
            del self.processes[name]
        elif isinstance(answer, Admitted):
            assert answer.config.stage == process.rank
            self.heard[name].add(answer.config.session)
            self.processes[name] = replace(process, session=answer.config.session)

    @invariant()
    def one_process_per_rank_and_one_group_per_process(self) -> None:
        assert all(len(sessions) <= 1 for sessions in self.heard.values())
        group = [process for process in self.processes.values() if process.session == self.roster.session != ""]
        assert len({process.rank for process in group}) == len(group)
        assert len(self.roster.identities()) in (0, 2)


Gatherings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGatherings = Gatherings.TestCase
