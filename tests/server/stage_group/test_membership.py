"""Membership of an external stage, with a virtual clock."""

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
from headrace.core.runtime.clock import VirtualClock
from headrace.core.runtime.process import CONFIGURATION_MISTAKE
from headrace.server.stage_group.membership import Membership

JOIN = JoinRequest(rank=1, world_size=2, incarnation="i", version="1", host="10.0.0.1")
CONFIG = StageConfig(
    rank=1, endpoint="", model=ModelConfig(), engine=EngineConfig(), transfer=TransferConfig(peer_timeout_s=3.0),
    session="secret",
)  # fmt: skip


class Stage:
    """A membership that is ticked at its deadlines."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.clock = VirtualClock(100.0)
        self.membership = Membership(JOIN, timeout_s, self.clock.now())
        self.sent: list[tuple[float, JoinRequest]] = []
        self.log: list[str] = []

    def receive(self, reply: AnyJoinReply) -> None:
        self.membership.receive(reply, self.clock.now())
        self._tick()

    def wait(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        self._tick()
        while self.membership.end is None and (deadline := self.membership.next_deadline()) <= end:
            self.clock.advance(max(0.0, deadline - self.clock.now()))
            self._tick()
        self.clock.advance(max(0.0, end - self.clock.now()))

    def _tick(self) -> None:
        if (message := self.membership.tick(self.clock.now())) is not None:
            self.sent.append((self.clock.now(), message))
        if line := self.membership.pop_log_line():
            self.log.append(line)


def test_joins_repeatedly_until_the_timeout() -> None:
    stage = Stage(timeout_s=60.0)
    stage.wait(59.0)
    assert stage.membership.end is None
    assert {message for _, message in stage.sent} == {JOIN}
    assert 100 < len(stage.sent) < 130
    stage.receive(JoinPending(message="waiting for stage 0 of 2"))
    stage.receive(JoinPending(message="waiting for stage 0 of 2"))
    assert stage.log == ["still joining after 30 s: no answer from the scheduler yet", "waiting for stage 0 of 2"]
    stage.wait(2.0)
    assert stage.membership.end is not None
    assert stage.membership.end.status == 1
    assert "not admitted within 60 s: waiting for stage 0 of 2" in stage.membership.end.message


def test_stays_a_member_while_the_scheduler_replies() -> None:
    stage = Stage()
    stage.receive(JoinAccepted(config=CONFIG))
    assert stage.membership.config == CONFIG
    stage.receive(JoinPending(message="a late reply"))
    stage.receive(JoinAccepted(config=replace(CONFIG, session="another")))
    assert stage.membership.config == CONFIG, "a process takes part in one group"
    for _ in range(100):
        stage.wait(5.0)
        stage.receive(JoinAccepted(config=CONFIG))
    assert stage.membership.end is None
    assert {message.session for time, message in stage.sent if time > 100.5} == {"secret"}
    assert stage.log == []
    stage.wait(8.9)
    assert stage.membership.end is None
    stage.wait(0.2)
    assert stage.membership.end is not None
    assert (stage.membership.end.status, stage.membership.end.message) == (1, "the scheduler has been silent for 9 s")
    sent = len(stage.sent)
    stage.wait(60.0)
    assert len(stage.sent) == sent, "no more JoinRequests are sent"


def test_refusal_and_end_of_the_group_end_the_membership_at_once() -> None:
    for reply, status in (
        (JoinRefused(code="wrong_key", message="no"), CONFIGURATION_MISTAKE),
        (GroupEnded(message="no"), 1),
    ):
        joining, member = Stage(), Stage()
        member.receive(JoinAccepted(config=CONFIG))
        for stage in (joining, member):
            stage.receive(reply)
            assert stage.membership.end is not None
            assert stage.membership.end.status == status
            assert stage.membership.end.message.endswith(": no")
