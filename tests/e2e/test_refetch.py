"""A decode server whose pool is too small preempts requests, and has their KV sent a second time."""

import pytest

from tests.e2e.harness import pages_in_use, pair, wait_until
from tests.e2e.models import Model, both

LARGE = ("--page-size", "16", "--max-model-len", "512", "--kv-pages", "400")
SMALL = ("--page-size", "16", "--max-model-len", "512", "--kv-pages", "36", "--no-prefix-cache", "--chunk-tokens", "64")
"""Two prompts of 250 tokens fit, and not what is generated behind them. A preempted one leaves nothing behind."""


@pytest.mark.full
@pytest.mark.parametrize("model", both(us_per_token=100))
def test_the_texts_of_preempted_requests_are_those_of_a_large_pool(model: Model) -> None:
    with pair((*model.flags, *LARGE), (*model.flags, *SMALL)) as (prefill, decode):
        model.check(decode, (240, 245, 250), 60)
        metrics = decode.metrics()
        assert metrics["headrace_preemptions_total"] > 0
        assert metrics['headrace_refetches_total{result="fetched"}'] > 0
        assert metrics['headrace_refetches_total{result="failed"}'] == 0
        assert prefill.total("headrace_cached_tokens_total") > 0, "it still had their prompts"
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")
