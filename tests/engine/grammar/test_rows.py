"""Rows with constraints on a stage: masked, advanced, rebuilt, and rejected alone."""

import pytest

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.packed import pack
from headrace.core.types.requests.constraint import Constraint, GrammarStart
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.stub import END
from headrace.engine.stub.runner import StubRunner

XYZ = Constraint("regex", "[xy]z{3}!?")
PARAMS = SamplingParams(temperature=1.0, stop_token_ids=(END,), grammar=XYZ.key)


@pytest.fixture
def runner() -> StubRunner:
    settings = ModelConfig(
        model="stub:layers=1,hidden=16,us_per_token=0,vocab=300,max_len=100", dtype="float32", device="cpu"
    )
    return StubRunner(plan_rank(settings, EngineConfig(page_size=4, kv_pages=40)))


def row(request: int, start: int, tokens: str, *, params: SamplingParams | None = PARAMS, **fields: object) -> PlanRow:
    pages = pack(range(10 * request, 10 * request + 10))
    return PlanRow(request, start, len(tokens) or 1, pages, pack(list(tokens.encode())), sample=params, **fields)  # type: ignore[arg-type]


def begun(tokens: str = "") -> GrammarStart:
    return GrammarStart(XYZ, pack(list(tokens.encode())))


def test_a_text_keeps_to_its_constraint_beside_one_that_has_none(runner: StubRunner) -> None:
    plain = SamplingParams(temperature=0.0)
    runner.execute([row(0, 0, "pr", params=None, grammar=begun())])  # a chunk brings the constraint
    result = runner.execute([row(0, 2, "ompt"), row(1, 0, "prompt", params=plain)])
    texts, free = [result.samples[0].token], [result.samples[1].token]
    for position in range(6, 12):
        rows = [row(0, position, "", generated=len(texts)), row(1, position, "", params=plain)]
        result = runner.execute(rows)
        assert not result.rejected
        texts.append(result.samples[0].token)
        free.append(result.samples[1].token)
    text = bytes(texts[:4]).decode()
    assert text[0] in "xy"
    assert text[1:] == "zzz"
    assert texts[4] in (ord("!"), END)
    assert texts[-1] == END
    alone = runner.execute([row(2, 0, "prompt", params=plain)]).samples[0].token
    assert free[0] == alone


def test_a_state_is_rebuilt_from_tokens_that_were_generated_before(runner: StubRunner) -> None:
    again = row(3, 0, "promptxz", grammar=begun("xz"), generated=2)
    assert runner.execute([again]).samples[0].token == ord("z")
    assert runner.execute([row(3, 8, "", generated=3)]).samples[0].token == ord("z")


def test_tokens_that_do_not_match_reject_one_request(runner: StubRunner) -> None:
    bad, good = row(0, 0, "promptq", grammar=begun("q")), row(1, 0, "prompt", grammar=begun())
    result = runner.execute([bad, good])
    (rejection,) = result.rejected
    assert rejection.request == 0
    assert "constraint" in rejection.message
    assert [sampled.request for sampled in result.samples] == [1]
    result = runner.execute([row(0, 7, ""), row(1, 6, "", generated=1)])  # planned before the rejection was known
    assert [each.request for each in result.rejected] == [0]
    assert [(each.request, each.token) for each in result.samples] == [(1, ord("z"))]


def test_a_constraint_that_no_row_has_brought_is_no_lack_of_one(runner: StubRunner) -> None:
    runner.execute([row(0, 0, "prompt", grammar=begun())])
    runner.release(0)
    (rejection,) = runner.execute([row(0, 6, "!")]).rejected
    assert "not known" in rejection.message


def test_min_tokens_hold_the_end_back_where_the_text_can_go_on(runner: StubRunner) -> None:
    params = SamplingParams(temperature=1.0, stop_token_ids=(END,), min_tokens=9, grammar=XYZ.key)
    start = row(0, 0, "promptxzzz", params=params, grammar=begun("xzzz"), generated=4)
    assert runner.execute([start]).samples[0].token == ord("!")
    assert runner.execute([row(0, 10, "", params=params, generated=5)]).samples[0].token == END


def test_logits_of_other_rows_stay(runner: StubRunner) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    both = runner.execute([row(0, 0, "prompt", grammar=begun()), row(1, 0, "prompt", params=params)])
    alone = runner.execute([row(2, 0, "prompt", params=params)])
    assert both.samples[1].logprob == alone.samples[0].logprob


def test_biases_and_penalties_choose_among_what_the_constraint_allows(runner: StubRunner) -> None:
    """x and y are as likely; a bias for what is not allowed changes nothing, and a penalty forbids nothing."""
    either = Constraint("regex", "[xy]{8}")
    start = GrammarStart(either)
    params = SamplingParams(
        temperature=0.0,
        stop_token_ids=(END,),
        grammar=either.key,
        frequency_penalty=2.0,
        logit_bias=((ord("y"), 3.0), (ord("q"), 100.0)),
    )
    result = runner.execute([row(0, 0, "prompt", params=params, grammar=start, history=TokenHistory())])
    text = [result.samples[0].token]
    for position in range(6, 13):
        text.append(runner.execute([row(0, position, "", params=params, generated=len(text))]).samples[0].token)
    assert bytes(text).decode() == "yyxyxyxy"  # y is at 3, 1, -1, …; x at 0, -2, …
