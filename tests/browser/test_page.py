"""The page of GET / in a real Chromium: under load, with hostile texts, when its server goes away and comes back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import httpx
import pytest

from tests.browser.chromium import Tab
from tests.e2e.harness import Server, pair, running, serving

pytestmark = pytest.mark.browser
MODEL = "stub:layers=4,us_per_token=100,vocab=1000,max_len=2048"
FLAGS = ("--model", MODEL, "--chunk-tokens", "128", "--kv-pages", "512", "--threads", "1")
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
PAINTED = """(() => {
  const canvas = document.getElementById("gantt"), [r, g, b] = getComputedStyle(document.documentElement)
    .getPropertyValue("--decode").trim().match(/[0-9a-f]{2}/gi).map(each => parseInt(each, 16));
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    found += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 12 && data[i + 3] > 80;
  return found;
})()"""


def shown(tab: Tab, server: Server) -> None:
    tab.open(f"{server.url}/")
    tab.wait("document.getElementById('main')?.hidden === false", "the page shows the server")


def complete(server: Server, rid: str, tokens: int = 24) -> httpx.Response:
    body = {"model": MODEL, "prompt": [3 + len(rid) % 7] * 500, "max_tokens": tokens, "temperature": 0}
    headers = {"X-Request-Id": rid}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)


@contextmanager
def load(server: Server, rid: Callable[[int], str]) -> Iterator[None]:
    """Four clients."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            complete(server, rid(number), 40)
            number += 4

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in clients:
            each.join()


def of_the_page(problems: list[str]) -> list[str]:
    """Without connections that a server which is away refuses, answers that ask for a key, and what PAINTED causes."""
    expected = ("ERR_CONNECTION_REFUSED", "401", "willReadFrequently")
    return [problem for problem in problems if not any(each in problem for each in expected)]


def test_a_pair_under_load_light_and_dark_wide_and_narrow(tab: Tab) -> None:
    with pair(FLAGS, FLAGS) as (prefill, decode), load(decode, lambda number: f"request-{number}"):
        tab.size(1440, 900)
        shown(tab, decode)
        tab.wait("document.querySelectorAll('#recent tbody tr').length > 3", "requests that have ended")
        tab.wait("document.querySelectorAll('#requests tbody tr').length > 0", "requests that are open")
        tab.wait(f"{PAINTED} > 50", "plans that decode, in the picture of the stages")
        assert tab.text("#state") == "ready"
        assert tab.text("#role") == "decode"
        assert prefill.url in tab.text("#map")
        assert "shm" in tab.text("#map .wire")
        assert "request-" in tab.text("#recent tbody")
        assert "512" in tab.text("#kv")
        assert "512 pages" in tab.text("#memory")
        assert tab.text("#ttft").split()[1] in ("ms", "s")
        for width in (1440, 820, 360):
            for dark in (False, True):
                tab.size(width, 900, dark)
                assert tab.value("document.documentElement.scrollWidth") <= width, "no part is wider than the page"
        assert tab.value("getComputedStyle(document.body).colorScheme") in ("normal", "light dark")
    assert {url.rpartition("/")[0] for url in tab.requests if url.startswith("http")} == {decode.url}
    assert not of_the_page(tab.problems)


def test_texts_of_clients_are_shown_as_they_are(tab: Tab) -> None:
    with serving("--role", "colocated", *FLAGS, "--served-model-name", HOSTILE) as server:
        shown(tab, server)
        tab.wait(f"document.getElementById('model').textContent === {HOSTILE!r}", "the model's name as text")
        server.post("/v1/completions", {"model": HOSTILE, "prompt": [1, 2, 3], "max_tokens": 2})
        server.post("/v1/completions", {"model": "no such model" + HOSTILE, "prompt": "x"})
        tab.wait("document.getElementById('events').textContent.includes('onerror')", "the error as text")
        assert tab.value("[...document.querySelectorAll('img, iframe, main script')].length") == 0
        assert tab.value("window.hit") is None
        blocked = "(() => { const it = document.createElement('script'); it.textContent = 'window.hit = 1'; "
        assert tab.value(f"{blocked} document.body.append(it); return window.hit === undefined; }})()"), "the policy"
    assert [problem for problem in tab.problems if "Content Security Policy" in problem]


def test_a_server_that_goes_away_and_comes_back(tab: Tab) -> None:
    flags = ("--role", "colocated", *FLAGS)
    with closing(Server(*flags)) as first:
        shown(tab, first.started())
        tab.wait("document.getElementById('state').textContent === 'ready'", "ready")
        first.kill()
        tab.wait("document.getElementById('state').textContent === 'no answer'", "it is away")
        assert "has not answered" in tab.text("#banner")
    with running(Server(*flags, port=first.port)):
        tab.wait("document.getElementById('state').textContent === 'ready'", "it is back")
        assert "it was started again" in tab.text("#events")
        assert tab.value("document.getElementById('banner').hidden") is True
    assert not of_the_page(tab.problems)


def test_the_key_is_asked_for_and_kept_until_the_page_is_loaded_again(tab: Tab) -> None:
    def enter(key: str) -> None:
        tab.value(f"document.getElementById('key').value = {key!r}; document.querySelector('#ask button').click()")

    asked = "document.getElementById('ask')?.hidden === false"
    with closing(Server("--role", "colocated", *FLAGS, "--api-key", "open-sesame")) as server:
        server.started()
        tab.open(f"{server.url}/")
        tab.wait(asked, "it asks for the key")
        assert tab.value("document.getElementById('main').hidden") is True
        enter("wrong")
        tab.wait("document.getElementById('why').textContent === 'That key is not valid.'", "a wrong key")
        enter("open-sesame")
        tab.wait("document.getElementById('main').hidden === false", "the right key")
        stored = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, location.href])"
        assert "sesame" not in tab.value(stored)
        assert "sesame" not in tab.value("document.documentElement.outerHTML")
        tab.open(f"{server.url}/")
        tab.wait(asked, "it asks again")
        assert server.end() == 0
    assert not of_the_page(tab.problems)


def test_the_page_of_the_api_shows_every_route_and_finds_fields(tab: Tab) -> None:
    with serving("--role", "colocated", *FLAGS, "--api-key", "k") as server:
        answer = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": "Bearer k"}, trust_env=False)
        tab.open(f"{server.url}/docs")
        tab.wait("document.getElementById('ask')?.hidden === false", "it asks for a key")
        tab.value("document.getElementById('key').value = 'k'")
        tab.value("document.querySelector('#ask button').click()")
        tab.wait("document.getElementById('main').hidden === false", "the document")
        assert all(path in tab.text("#routes") for path in answer.json()["paths"])
        tab.value("document.getElementById('find').value = 'logprob_start_len'")
        tab.value("document.getElementById('find').dispatchEvent(new Event('input')) && 0")
        assert tab.value("document.querySelectorAll('#routes details:not([hidden])').length") == 1
        assert "/generate" in tab.text("#routes")
        tab.value("location.hash = 'GenerateSampling'")
        tab.wait("document.getElementById('GenerateSampling').open", "a link to an object opens it")
    assert not of_the_page(tab.problems)
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {server.url.split("/")[2]}
