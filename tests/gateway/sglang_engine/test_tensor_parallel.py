"""An engine of two ranks, each of which takes its heads from the gateway: make test-sglang."""

from collections.abc import Iterator

import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import serving
from tests.engine.models import Saved
from tests.gateway.sglang_engine.engine import Sglang, answered, serving_sglang
from tests.gateway.sglang_engine.llama import ENGINE, asked, greedy, prefill_flags, prompt
from tests.gateway.sglang_engine.site import Site, gateway_of

pytestmark = pytest.mark.sglang

PAGE = 32


@pytest.fixture(scope="module")
def ranks(llama: Saved) -> Iterator[Sglang]:
    flags = (*ENGINE, "--tp", "2", "--page-size", str(PAGE), "--nccl-port", str(free_port()))
    with serving_sglang(llama.folder, *flags, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def site(llama: Saved, ranks: Sglang) -> Iterator[Site]:
    with serving(*prefill_flags(llama)) as server, gateway_of((ranks,), (server,), page=PAGE) as made:
        yield made


@pytest.mark.parametrize("length", [1, 31, 32, 33, 300, 1000])
def test_both_ranks_go_on_from_what_they_were_sent(site: Site, llama: Saved, length: int) -> None:
    ids = prompt(length)
    assert answered(site.ask("/generate", asked(ids)))["output_ids"] == greedy(llama, ids)
    for rank in range(2):
        assert site.gateway.log.count(f"rank {rank} of 2: registered") == 1
