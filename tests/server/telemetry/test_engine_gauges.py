"""What llm-d's endpoint picker reads of /metrics, under Headrace's names and vLLM's."""

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.stats import Sample, Stats
from headrace.text.tokenizer import Tokenizer
from tests.deployment.files import ROOT, load_yaml
from tests.server.fakes import FakeLink, client, in_loop, running

PHASES = {"bootstrap": 1, "waiting": 2, "running": 4, "inflight": 8, "fetching": 16, "generating": 32}
PAGES = {"free": 50, "cached": 30, "leased": 20}
STATS = Stats(
    tuple(Sample("queue_requests", value, (phase,)) for phase, value in PHASES.items())
    + tuple(Sample("kv_pages", value, (state,)) for state, value in PAGES.items())
)
# The defaults of the picker's core-metrics-extractor for pods of engine type vllm (llm-d/llm-d-router at ebab6879,
# pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go).
VLLM = {
    "name": "vllm",
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "cacheInfoSpec": "vllm:cache_config_info",
    "cacheBlockSizeLabelName": "block_size",
    "cacheNumBlocksLabelName": "num_gpu_blocks",
}
((PLUGIN,),) = (load_yaml(ROOT / "configs/llm-d/endpoint-picker.yaml"),)
(HEADRACE,) = PLUGIN["parameters"]["engineConfigs"]


def picked(engine: dict[str, str], text: str) -> dict[str, Any]:
    """What the picker extracts by an engine's configuration: the series of a name whose labels match, the value or two
    of its labels."""
    series = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}

    def found(spec: str) -> Any:
        name, labels = re.fullmatch(r"([\w:]+)(?:\{(.*)\})?", engine[spec]).groups()  # type: ignore[union-attr]
        assert labels is None, "one series for each"
        return series[name]

    info = found("cacheInfoSpec").labels
    return {
        "waiting": found("queuedRequestsSpec").value,
        "running": found("runningRequestsSpec").value,
        "usage": found("kvUsageSpec").value,
        "block_size": int(info[engine["cacheBlockSizeLabelName"]]),
        "blocks": int(info[engine["cacheNumBlocksLabelName"]]),
    }


@pytest.mark.parametrize(("names", "engine"), [("headrace", HEADRACE), ("vllm", HEADRACE), ("vllm", VLLM)])
@in_loop
async def test_the_endpoint_picker_finds_what_it_looks_for(
    tokenizer: Tokenizer, names: str, engine: dict[str, str]
) -> None:
    link = FakeLink()
    link.stats = STATS
    async with running(link, tokenizer, metrics_names=names) as service, client(service) as http:
        page_size = service.config.engine.page_size
        text = (await http.get("/metrics")).text
    assert picked(engine, text) == {
        "waiting": 19, "running": 36, "usage": 0.2, "block_size": page_size, "blocks": 100
    }  # fmt: skip
    assert ("vllm:" in text) == (names == "vllm")
    assert names == "headrace" or 'vllm:num_requests_running{engine="0",model_name="tiny"} 36.0' in text.splitlines()


@in_loop
async def test_before_the_scheduler_has_answered_nothing_is_made_up(tokenizer: Tokenizer) -> None:
    link = FakeLink(answers_probes=False)
    async with running(link, tokenizer, metrics_names="vllm") as service, client(service) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    assert not [line for line in lines if line.startswith(("headrace_kv_info{", "vllm:cache_config_info{"))]
