"""Sends the planned requests and records what came of them.

open loop     ─┬─ due ─► task ─► outcome     each request is sent at its time, whatever became of those before
               ├─ due ─► task ─► outcome     latencies count from due: a client that is late adds to them
closed loop    N tasks, each sends its next request when its last one has ended; due is when it may be sent
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.runtime.clock import Clock
from headrace.tools.bench.http_client import ConnectionLost, HttpClient
from headrace.tools.bench.outcome import INTERRUPTED, BenchOutcome
from headrace.tools.bench.stream_reader import StreamReader
from headrace.tools.bench.workload import PlannedRequest, token_ids

COMPLETIONS = "/v1/completions"
PREFILL = "/v1/prefill"
PREPARED_TOKENS = 20_000_000  # prompts of fewer tokens are encoded before the start; a burst would wait for them


class BenchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent."""

    model: str
    path: str
    """COMPLETIONS or PREFILL."""
    seed: int
    timeout_s: float
    """Of one request, from when it is sent."""
    temperature: float
    ignore_eos: bool
    open_loop: bool
    """Whether requests have times; else concurrency of them are kept open."""
    concurrency: int
    """The most requests that are open at once; 0 for any number."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All outcomes."""

    outcomes: Sequence[BenchOutcome]
    seconds: float
    """From the start to the end of the last request, or to the interrupt."""
    interrupted: bool


class BenchRunner:
    """One measurement. ended: called with the number of requests that have ended."""

    def __init__(self, client: HttpClient, load: BenchLoad, clock: Clock, ended: Callable[[int], None]) -> None:
        self._client = client
        self._load = load
        self._clock = clock
        self._ended = ended
        self._outcomes: list[BenchOutcome] = []
        self._free = asyncio.Semaphore(load.concurrency or 1 << 30)
        self._start = 0.0

    async def run(self, requests: Sequence[PlannedRequest], stop: asyncio.Event) -> Measured:
        """Send them all; those that are open at stop count as interrupted."""
        bodies: Iterable[bytes] = map(self._body, requests)
        if sum(request.input_tokens for request in requests) < PREPARED_TOKENS:
            bodies = list(bodies)
        self._start = self._clock.now()
        send = self._send_due if self._load.open_loop else self._send_closed
        sending = asyncio.create_task(send(zip(requests, bodies, strict=True)))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
        interrupted = not sending.done()
        stopping.cancel()
        if interrupted:
            sending.cancel()
        await asyncio.gather(sending, stopping, return_exceptions=True)
        if not interrupted:
            sending.result()
        return Measured(outcomes=self._outcomes, seconds=self._now(), interrupted=interrupted)

    async def warm_up(self, requests: Sequence[PlannedRequest]) -> BenchOutcome | None:
        """Send requests one after the other, which do not count. Returns the first that failed."""
        self._start = self._clock.now()
        for request in requests:
            await self._one(request, self._body(request), self._now())
            if not (outcome := self._outcomes.pop()).ok:
                return outcome
        return None

    async def _send_due(self, requests: Iterable[tuple[PlannedRequest, bytes]]) -> None:
        """The open loop. A body is made before its request is due."""
        async with asyncio.TaskGroup() as tasks:
            for request, body in requests:
                await asyncio.sleep(max(0.0, request.due_s - self._now()))
                tasks.create_task(self._limited(request, body))

    async def _limited(self, request: PlannedRequest, body: bytes) -> None:
        async with self._free:
            await self._one(request, body, request.due_s)

    async def _send_closed(self, requests: Iterable[tuple[PlannedRequest, bytes]]) -> None:
        waiting = iter(requests)

        async def client() -> None:
            for request, body in waiting:
                await self._one(request, body, self._now())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._load.concurrency):
                tasks.create_task(client())

    async def _one(self, request: PlannedRequest, body: bytes, due_s: float) -> None:
        """Send one request and record its outcome."""
        reader = StreamReader(streamed=self._load.path == COMPLETIONS)
        sent = self._now()
        status, message = INTERRUPTED, ""
        try:
            async with asyncio.timeout(self._load.timeout_s):
                http_status = await self._client.post(
                    self._load.path, body, lambda data, at: reader.feed(data, at - self._start)
                )
            status, message = reader.end(http_status, self._now())
        except TimeoutError:
            status, message = "timeout", f"no complete answer within {self._load.timeout_s:g} s"
        except ConnectionLost as error:
            status, message = "connection lost", str(error)
        except OSError as error:
            status, message = "no connection", error.strerror or str(error)
        finally:
            self._outcomes.append(
                BenchOutcome(
                    due_s=due_s,
                    sent_s=sent,
                    token_s=tuple(reader.token_s),
                    last_s=reader.last_s,
                    ended_s=self._now(),
                    input_tokens=reader.input_tokens or request.input_tokens,
                    cached_tokens=reader.cached_tokens,
                    output_tokens=reader.output_tokens,
                    status=status,
                    message=message,
                )
            )
            self._ended(len(self._outcomes))

    def _body(self, request: PlannedRequest) -> bytes:
        load = self._load
        if load.path == PREFILL:
            ids, text = (token_ids(request, load.seed), None) if request.segments else (None, request.text)
            return PrefillRequest(
                model=load.model,
                temperature=load.temperature,
                prompt_token_ids=ids,
                prompt=text,
                max_tokens=1,
                handoff="none",
            ).encoded()
        return msgspec.json.encode(
            {
                "model": load.model,
                "temperature": load.temperature,
                "prompt": token_ids(request, load.seed) if request.segments else request.text,
                "max_tokens": request.output_tokens,
                "ignore_eos": load.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _now(self) -> float:
        return self._clock.now() - self._start
