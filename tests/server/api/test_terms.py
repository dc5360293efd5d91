"""Tenants by API key, ranges of priorities, and objectives for the first token, from HTTP to the scheduler."""

from typing import Any

import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.types.errors import ConfigError
from headrace.core.types.requests.tenants import priority_ranges, tenant_keys
from headrace.core.types.requests.terms import RequestTerms
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying

CHAT = [{"role": "user", "content": "x"}]
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/responses", {"input": "x"}),
    ("/generate", {"text": "x"}),
    ("/v1/prefill", {"prompt": "x", "handoff": "none"}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
@in_loop
async def test_every_form_of_request_carries_priority_objective_and_tenant(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    settings = {"tenant_keys": ("acme=k1", "zeta=k2"), "api_keys": ("k0",), "priority_ranges": ("0:9", "acme=-5:5")}
    async with running(link, tokenizer, **settings) as service, client(service) as http:

        async def post(key: str, slo: str | None, **more: Any) -> RequestTerms:
            headers = {"Authorization": f"Bearer {key}"} | ({} if slo is None else {"x-llm-d-slo-ttft-ms": slo})
            response = await http.post(path, json=body | more, headers=headers)
            assert response.status_code == 200, response.text
            return link.of(Submit)[-1].terms

        plain = await post("k0", None)
        assert (plain.tenant, plain.priority, plain.slo_ttft_s) == ("", 0, None)
        first = await post("k1", "1500", priority=-7)
        assert (first.tenant, first.priority, first.slo_ttft_s) == ("acme", -5, 1.5)
        second = await post("k2", "1500", priority=-7, slo_ttft_ms=250)
        assert (second.tenant, second.priority, second.slo_ttft_s) == ("zeta", 0, 0.25)
        assert (await post("k2", None, priority=1000)).priority == 9


@pytest.mark.parametrize(("path", "body"), FORMS)
@in_loop
async def test_every_form_of_request_may_name_a_replica(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        for header, more, replica in ((None, {}, None), ("3", {}, 3), ("3", {"data_parallel_rank": 0}, 0)):
            headers = {} if header is None else {"X-data-parallel-rank": header}
            response = await http.post(path, json=body | more, headers=headers)
            assert response.status_code == 200, response.text
            assert link.of(Submit)[-1].terms.replica == replica
        sent = len(link.of(Submit))
        for rank in (-1, 1 << 80, "one", 0.5):
            response = await http.post(path, json=body | {"data_parallel_rank": rank})
            assert (response.status_code, json_of(response)["error"]["param"]) == (400, "data_parallel_rank"), rank
        for header in ("-1", "one", "", "1.5", "9" * 30, "9" * 40):
            response = await http.post(path, json=body, headers={"X-data-parallel-rank": header})
            assert (response.status_code, json_of(response)["error"]["param"]) == (400, "data_parallel_rank"), header
    assert len(link.of(Submit)) == sent


@pytest.mark.parametrize(("path", "body"), FORMS)
@in_loop
async def test_objectives_that_are_none_are_refused_by_name(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        for more in ({"slo_ttft_ms": 0}, {"slo_ttft_ms": -3}, {"slo_ttft_ms": 1e300}, {"slo_ttft_ms": "soon"}):
            response = await http.post(path, json=body | more)
            assert (response.status_code, json_of(response)["error"]["param"]) == (400, "slo_ttft_ms"), more
        for header in ("soon", "0", "nan", "inf", "-1", ""):
            response = await http.post(path, json=body, headers={"x-llm-d-slo-ttft-ms": header})
            assert (response.status_code, json_of(response)["error"]["param"]) == (400, "x-llm-d-slo-ttft-ms"), header
    assert link.of(Submit) == []


@in_loop
async def test_without_a_range_any_priority_passes_and_a_wrong_key_has_no_tenant(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer, tenant_keys=("acme=k1",)) as service, client(service) as http:
        body = {"prompt": "x", "priority": -(1 << 31)}
        assert (await http.post("/v1/completions", json=body)).status_code == 401
        assert (
            await http.post("/v1/completions", json=body, headers={"Authorization": "Bearer acme"})
        ).status_code == 401
        good = await http.post("/v1/completions", json=body, headers={"Authorization": "Bearer k1"})
        assert good.status_code == 200
    assert link.of(Submit)[0].terms.priority == -(1 << 31)


def test_settings_of_tenants_are_parsed_or_refused() -> None:
    assert tenant_keys(["a=x=y", "b-1.c=z"]) == {"a": "x=y", "b-1.c": "z"}
    assert priority_ranges(["0:9", "a=-5:5"]) == {"": (0, 9), "a": (-5, 5)}
    for keys in (["a"], ["=k"], ["a="], ["a b=k"], ["a=k", "a=l"], ["a=k", "b=k"]):
        with pytest.raises(ConfigError, match="--tenant-key") as error:
            tenant_keys(keys)
        assert "k" not in str(error.value).replace("--tenant-key", "").replace("KEY", "").replace("key", "").split()
    for ranges in (["1"], ["1:"], ["2:1"], ["a=b:c"], ["1.5:2"]):
        with pytest.raises(ConfigError, match="--priority-range"):
            priority_ranges(ranges)
