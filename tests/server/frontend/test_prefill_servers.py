"""The prefill servers of a decode server: discovery, the choice of the least loaded one, and servers that go down."""

import asyncio

import httpx

from headrace.core.messages.frontend import AddPrefill, RemovePrefill, Submit
from headrace.core.messages.replies import PrefillState
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import FetchFrom
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, TWO, Prefills, decode, fetched, until_ready, welcoming
from tests.server.fakes import FakeLink, client, in_loop, json_of, reserving, running, saying


def prefill_of(submit: Submit) -> str:
    """The prefill server that a request is fetched from."""
    assert isinstance(submit.route, FetchFrom)
    return submit.route.prefill


@in_loop
async def test_a_server_is_found_after_whatever_went_wrong(tokenizer: Tokenizer) -> None:
    class Odd(Prefills):
        errors: tuple[Exception, ...] = (
            httpx.InvalidURL("no URL"),
            OSError(24, "Too many open files"),
            ValueError("?"),
        )

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.errors:
                error, *rest = self.errors
                self.errors = tuple(rest)
                raise error
            return await super().handle_async_request(request)

    link = FakeLink(fetched(tokenizer))
    async with running(link, tokenizer, role="decode", prefill=(ONE,), prefill_transport=Odd()) as service:
        await link.wait_for(AddPrefill)
        assert service.prefills.servers()[0].target is not None


@in_loop
async def test_the_least_loaded_server_gets_the_next_prompt(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(reserving), Prefills()
    prefills.hold.clear()
    async with (
        running(
            link, tokenizer, role="decode", prefill=(ONE, TWO), prefill_transport=prefills, routing="least-load"
        ) as service,
        client(service) as http,
    ):
        await link.wait_for(AddPrefill, 2)
        welcoming(link, ONE, TWO)
        await until_ready(http)
        asked = []
        for number, length in enumerate((50, 20, 20, 20), 1):
            asked.append(asyncio.create_task(http.post("/v1/completions", json={"prompt": [5] * length})))
            await link.wait_for(Submit, number)
        assert [prefill_of(submit) for submit in link.of(Submit)] == [ONE, TWO, TWO, TWO]
        for submit in link.of(Submit):
            for output in saying(tokenizer, "hello")(link, submit):
                link.say(output)
        prefills.hold.set()
        assert {response.status_code for response in await asyncio.gather(*asked)} == {200}
        await http.post("/v1/models")
        asked = [asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))]
        await link.wait_for(Submit, 5)
        assert prefill_of(link.of(Submit)[4]) == ONE, "the load of answered prompts is gone"
        asked[0].cancel()


@in_loop
async def test_a_server_that_went_down_gets_no_prompts_and_is_discovered_again(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        prefills.instance, prefills.control_ports["p1"] = "b" * 32, 6001
        link.say(PrefillState(name=ONE, up=False, reason="silent"))
        assert await link.wait_for(AddPrefill, 2) == AddPrefill(name=ONE, endpoint="tcp://p1:6001")
        assert link.of(RemovePrefill) == [RemovePrefill(name=ONE)]
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, json_of(refused)["error"]["code"]) == (503, "no_prefill_server")
        assert refused.headers["retry-after"] == "1"
        welcoming(link, ONE)
        await until_ready(http)
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@in_loop
async def test_a_server_that_starts_later_is_discovered(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(), Prefills()
    control_server = prefills.control_ports.pop("p1")
    async with running(link, tokenizer, role="decode", prefill=(ONE,), prefill_transport=prefills) as service:
        while (
            "connection refused"
            not in (service.readiness.not_ready() or ErrorInfo(code="", message="", status=0)).message
        ):
            await asyncio.sleep(0)
        prefills.control_ports["p1"] = control_server
        await link.wait_for(AddPrefill)
