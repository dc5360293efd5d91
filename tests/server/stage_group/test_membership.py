"""A stage's membership, with time by hand."""

from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.membership import Admitted, AnswerMessage, Dismissed, JoinRequest, Refused, Waiting
from headrace.core.runtime.clock import VirtualClock
from headrace.server.stage_group.membership import Membership

JOIN = JoinRequest(rank=1, world_size=2, incarnation="i", version="1", host="10.0.0.1")
CONFIG = StageConfig(
    stage=1, endpoint="", model=ModelConfig(), engine=EngineConfig(), transfer=TransferConfig(peer_timeout_s=3.0),
    session="secret",
)  # fmt: skip


class Stage:
    """A membership whose deadlines are kept."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.clock = VirtualClock(100.0)
        self.membership = Membership(JOIN, timeout_s, self.clock.now())
        self.said: list[tuple[float, JoinRequest]] = []
        self.news: list[str] = []

    def hear(self, answer: AnswerMessage) -> None:
        self.membership.receive(answer, self.clock.now())
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
            self.said.append((self.clock.now(), message))
        if news := self.membership.news():
            self.news.append(news)


def test_it_goes_on_asking_and_gives_up_in_time() -> None:
    stage = Stage(timeout_s=60.0)
    stage.wait(59.0)
    assert stage.membership.end is None
    assert {message for _, message in stage.said} == {JOIN}
    assert 100 < len(stage.said) < 130
    stage.hear(Waiting(message="waiting for stage 0 of 2"))
    stage.hear(Waiting(message="waiting for stage 0 of 2"))
    assert stage.news == ["still joining after 30 s: no answer from the scheduler yet", "waiting for stage 0 of 2"]
    stage.wait(2.0)
    assert stage.membership.end is not None
    assert stage.membership.end.status == 1
    assert "not admitted within 60 s: waiting for stage 0 of 2" in stage.membership.end.message


def test_a_member_stays_one_while_the_scheduler_answers() -> None:
    stage = Stage()
    stage.hear(Admitted(config=CONFIG))
    assert stage.membership.config == CONFIG
    stage.hear(Waiting(message="a late word"))
    stage.hear(Admitted(config=replace(CONFIG, session="another")))
    assert stage.membership.config == CONFIG, "a process takes part in one group"
    for _ in range(100):
        stage.wait(5.0)
        stage.hear(Admitted(config=CONFIG))
    assert stage.membership.end is None
    assert {message.session for time, message in stage.said if time > 100.5} == {"secret"}
    assert stage.news == []
    stage.wait(8.9)
    assert stage.membership.end is None
    stage.wait(0.2)
    assert stage.membership.end is not None
    assert (stage.membership.end.status, stage.membership.end.message) == (1, "the scheduler has been silent for 9 s")
    said = len(stage.said)
    stage.wait(60.0)
    assert len(stage.said) == said, "it has nothing more to say"


def test_refused_and_dismissed_are_the_end_at_once() -> None:
    for answer, status in ((Refused(code="wrong_key", message="no"), 2), (Dismissed(message="no"), 1)):
        joining, member = Stage(), Stage()
        member.hear(Admitted(config=CONFIG))
        for stage in (joining, member):
            stage.hear(answer)
            assert stage.membership.end is not None
            assert stage.membership.end.status == status
            assert stage.membership.end.message.endswith(": no")
