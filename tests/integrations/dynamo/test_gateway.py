"""A gateway in the place of a prefill server: what its worker registers, and what it answers."""

import pytest

from headrace.core.types.errors import HeadraceError
from headrace.integrations.dynamo.answer import gateway_chunk
from headrace.integrations.dynamo.request import gateway_body
from headrace.integrations.dynamo.server import Server
from tests.gateway.site import failing, gateway_site
from tests.integrations.dynamo.requests import request
from tests.integrations.dynamo.test_command import settings
from tests.server.fakes import in_loop

PATH = "/v1/completions"


@in_loop
async def test_its_answer_is_what_dynamos_decode_worker_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        server = Server(settings("prefill", "--url", str(site.http.base_url).rstrip("/")))
        assert await server.problem() is None
        found = await server.describe()
        assert (found.kind, found.model, found.context_length, found.page_size) == ("gateway", "smollm2", 4096, 0)
        body = gateway_body(request(model="smollm2", routing={"priority": 2, "cache_salt": "s", "dp_rank": 0}))
        chunk = gateway_chunk(await server.post(PATH, body, {"x-request-id": "mine"}))
        [prompt] = await site.posted(1)
        assert (prompt["prompt_token_ids"], prompt["priority"]) == ([5, 6, 7], -2)
        params = chunk["disaggregated_params"]["kv_transfer_params"]
        assert params == {"do_remote_prefill": True, "remote_num_tokens": 3}, "the gateway's own, as they are"
        assert chunk["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        await server.close()


@in_loop
async def test_the_decode_engine_computes_what_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        site.peer.script = failing("no_kv")
        server = Server(settings("prefill", "--url", str(site.http.base_url).rstrip("/")))
        chunk = gateway_chunk(await server.post(PATH, gateway_body(request()), {}))
        assert chunk["disaggregated_params"] == {}
        with pytest.raises(HeadraceError) as refused:
            await server.post("/generate", gateway_body(request()), {})
        assert refused.value.info.code == "wrong_role"
        await server.close()
