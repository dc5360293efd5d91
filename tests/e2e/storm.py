"""A storm of requests from one client process: many are taken back at random points, the rest must be right.

whole ──────► POST, read the answer                        ┐ taken back by closing the connection after a random
streamed ───► POST, read events as they come               ├ time, or by DELETE under the id that the first event
prefill ────► POST /v1/prefill, the KV goes nowhere        ┘ or the request itself names; some only when all is over
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from headrace.text.tokenizer import Tokenizer
from tests.e2e.models import StubOracle, spoken

Way = Literal["whole", "streamed", "prefill"]
Taking = Literal["leave", "delete", "late"]
WAYS: tuple[Way, ...] = ("whole", "streamed", "prefill")
MOST_TOKENS = 6
TIMEOUT_S = 120.0  # far above any deadline of the servers: a request that waits so long has been forgotten
FIRST_GUESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what follows them: MOST_TOKENS tokens."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]


def make_prompts(sizes: str, count: int, longest: int, seed: int) -> list[Prompt]:
    """Prompts of 1 to `longest` tokens, some with a common beginning, and their continuations by one runner alone.
    sizes: of a stub, without the time that it takes."""
    oracle = StubOracle(sizes, longest + MOST_TOKENS)
    generator = random.Random(seed)
    common = [generator.randrange(oracle.vocab_size) for _ in range(longest)]
    made = []
    for _ in range(count):
        length = generator.choice((1, generator.randint(1, 40), generator.randint(1, longest)))
        own = generator.randint(0, length)
        ids = common[: length - own] + [generator.randrange(oracle.vocab_size) for _ in range(own)]
        made.append(Prompt(tuple(ids), oracle.greedy(ids, MOST_TOKENS)))
    return made


@dataclass(slots=True)
class Errand:
    """One request. taking: how it is taken back, after_s from its start, or for a DELETE from when its rid is known."""

    way: Way
    prompt: Prompt
    tokens: int
    body: dict[str, Any]
    taking: Taking | None = None
    after_s: float = 0.0
    rid: str = ""
    named: asyncio.Event = field(default_factory=asyncio.Event)
    deleted: bool = False

    def name(self, rid: str) -> None:
        self.rid = rid
        self.named.set()


@dataclass(frozen=True, slots=True)
class Answer:
    """code: of the error, "" when there is none. said: the text, or the first token's id as text."""

    code: str
    said: str
    seconds: float = field(default=0.0, compare=False)


class Storm:
    """Sends requests and judges the answers. outcomes: how they ended; wrong: what should not have been."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, prompts: Sequence[Prompt], *, seed: int, taking: float, concurrency: int
    ) -> None:
        """taking: share of requests that are taken back, for many of which it will be too late."""
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._model = model
        self._prompts = prompts
        self._random = random.Random(seed)
        self._taking = taking
        self._concurrency = concurrency
        self._tokenizer = tokenizer
        self._usual_s = dict.fromkeys(WAYS, FIRST_GUESS_S)  # so as to take requests back at all points of their lives

    def run(self, requests: int, url: str, prefill_url: str = "") -> None:
        """That many requests to a server that decodes. prefill_url: the server that it takes its prefill from; some
        requests go there alone, and some are taken back there. "": the server computes its prompts itself."""
        asyncio.run(self._run(requests, url, prefill_url or url))

    async def _run(self, requests: int, url: str, prefill_url: str) -> None:
        numbers = iter(range(requests))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a long list of idle ones is slow

        async def work(http: httpx.AsyncClient) -> None:
            for number in numbers:
                await self._request(http, self._draw(number), url, prefill_url)

        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(work(http))

    def _draw(self, number: int) -> Errand:
        draw = self._random
        errand = Errand(draw.choice(WAYS), draw.choice(self._prompts), draw.randint(1, MOST_TOKENS), {})
        errand.body = {"model": self._model, "max_tokens": errand.tokens, "temperature": 0}
        if draw.random() < 0.5:
            errand.body["cache_salt"] = str(number)  # no shared pages: the whole prompt is computed
        if errand.way == "prefill":
            errand.name(f"storm-{draw.getrandbits(64):x}")
        if draw.random() < self._taking:
            errand.taking = "leave" if errand.way == "whole" else draw.choice(("leave", "delete", "delete", "late"))
            named_late = errand.way == "streamed" and errand.taking == "delete"
            errand.after_s = draw.uniform(-0.1, 0.3 if named_late else 1.0) * self._usual_s[errand.way]
        return errand

    async def _request(self, http: httpx.AsyncClient, errand: Errand, url: str, prefill_url: str) -> None:
        target = prefill_url if errand.way == "prefill" else url
        other = self._random.choice((target, target, prefill_url))  # where to take it back
        call = asyncio.create_task(self._ask(http, errand, target))
        if errand.taking == "leave":
            await asyncio.wait({call}, timeout=max(0.0, errand.after_s))
            if call.cancel():
                await asyncio.wait({call})
                self.outcomes["left"] += 1
                return
        elif errand.taking == "delete":
            await _first_of(call, errand.named.wait())
            await asyncio.wait({call}, timeout=max(0.0, errand.after_s))
            errand.deleted = await self._delete(http, other, errand)
        self._judge(errand, await call)
        if errand.taking == "late" and await self._delete(http, other, errand):
            self.wrong.append(f"{errand} could be taken back when it had ended")

    def _judge(self, errand: Errand, answer: Answer) -> None:
        if answer.code == "cancelled" and errand.deleted:
            self.outcomes["cancelled"] += 1
        elif answer == Answer("", self._expected(errand)):
            self.outcomes["right"] += 1
            self._usual_s[errand.way] += (answer.seconds - self._usual_s[errand.way]) / 20
        else:
            self.wrong.append(f"{errand} was answered {answer}, expected {self._expected(errand)!r}")

    def _expected(self, errand: Errand) -> str:
        if errand.way == "prefill":
            return str(errand.prompt.tokens[0])
        return spoken(self._tokenizer, errand.prompt.ids, errand.prompt.tokens[: errand.tokens])

    async def _delete(self, http: httpx.AsyncClient, url: str, errand: Errand) -> bool:
        """Whether the request was open there."""
        answer = await http.delete(f"{url}/v1/prefill/{errand.rid}")
        if answer.status_code not in (200, 404):
            self.wrong.append(f"DELETE for {errand} was answered {answer.status_code} {answer.text}")
        return answer.status_code == 200

    async def _ask(self, http: httpx.AsyncClient, errand: Errand, url: str) -> Answer:
        started = asyncio.get_running_loop().time()
        ask = {"whole": self._whole, "streamed": self._streamed, "prefill": self._prefill}[errand.way]
        code, said = await ask(http, errand, url)
        return Answer(code, said, asyncio.get_running_loop().time() - started)

    async def _whole(self, http: httpx.AsyncClient, errand: Errand, url: str) -> tuple[str, str]:
        found = (await http.post(f"{url}/v1/completions", json={**errand.body, "prompt": errand.prompt.ids})).json()
        return _code(found), "" if "error" in found else str(found["choices"][0]["text"])

    async def _prefill(self, http: httpx.AsyncClient, errand: Errand, url: str) -> tuple[str, str]:
        body = {**errand.body, "prompt_token_ids": errand.prompt.ids, "handoff": "none", "rid": errand.rid}
        found = (await http.post(f"{url}/v1/prefill", json=body)).json()
        return _code(found), "" if "error" in found else str(found["first_token"]["id"])

    async def _streamed(self, http: httpx.AsyncClient, errand: Errand, url: str) -> tuple[str, str]:
        options = {"stream": True, "stream_options": {"include_progress": True}}
        body = {**errand.body, "prompt": errand.prompt.ids, **options}
        text, code = "", "no end of the stream"
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return ("" if code == "no end of the stream" else code), text
                if line.startswith("{"):  # an error before the stream began
                    return _code(json.loads(line)), text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    errand.name(event.get("id", errand.rid))
                    code = _code(event) or code
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
        return code, text


async def _first_of(call: "asyncio.Task[Answer]", other: Coroutine[Any, Any, Any]) -> None:
    """Until the call is over or the other thing has happened."""
    waiting = asyncio.ensure_future(other)
    await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _code(body: dict[str, Any]) -> str:
    return str(body["error"]["code"]) if "error" in body else ""
