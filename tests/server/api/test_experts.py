"""GET /debug/experts and the metric of imbalance: the sum over ranks."""

from array import array

from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, running


def load(stage: int, layer: int, first: int, rows: list[int]) -> ExpertLoad:
    return ExpertLoad(stage=stage, layers=(layer,), first=first, rows=array("q", rows).tobytes())


@in_loop
async def test_rows_and_imbalance_are_summed_over_the_ranks_of_a_stage(tokenizer: Tokenizer) -> None:
    """Each rank's own experts are balanced; those of both together are not."""
    link = FakeLink()
    link.experts = (load(0, 2, 0, [30, 30]), load(0, 2, 2, [10, 10]), load(1, 5, 0, [7, 7, 7, 7]))
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        body = json_of(await http.get("/debug/experts"))
        assert body == {"layers": [{"layer": 2, "rows": [30, 30, 10, 10]}, {"layer": 5, "rows": [7, 7, 7, 7]}]}
        metrics = (await http.get("/metrics")).text
        assert 'headrace_expert_imbalance{stage="0"} 1.5' in metrics
        assert 'headrace_expert_imbalance{stage="1"} 1.0' in metrics


@in_loop
async def test_a_dense_model_has_none(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, role="prefill") as service, client(service) as http:
        assert json_of(await http.get("/debug/experts")) == {"layers": []}
        assert "headrace_expert_imbalance{" not in (await http.get("/metrics")).text
