"""The simulator: runs schedulers under virtual time with random delays, cancels, lost peers and crashed stages.

    colocated:   clients ─► server (some requests are dropped after the first token)
    pair:        clients ─► decode server ─► its front end ─► prefill server ─► chunks ─► decode server

A run follows from its seed. All that must hold whatever the schedule is checked as it happens, and violations are
collected.
"""

import random
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.config.scheduler import Policy
from headrace.core.messages.frontend import Abort, AddPrefill, RequestFailed, Reserved, SchedulerReply, Submit
from headrace.core.messages.peers import AskCancel, AskReserve, ConnectPrefill
from headrace.core.types.backends import SHM, ZMQ
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack
from headrace.core.types.request import AnyRoute, DecodeHere, Discard, FetchFrom, SamplingParams, SendTo
from headrace.scheduler.routing.failover import PrefillAttempts
from headrace.scheduler.scheduler import Effect
from headrace.scheduler.simulation.link import SimulatedLinks
from headrace.scheduler.simulation.model import VOCABULARY
from headrace.scheduler.simulation.server import SimulatedClient, SimulatedServer, SimulationReport
from headrace.scheduler.simulation.world import World

Shape = Literal["colocated", "pair"]
POLICIES: tuple[Policy, ...] = ("srpt", "fcfs", "slo")
MAX_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate."""

    seed: int
    shape: Shape = "colocated"
    requests: int = 12
    arrivals_s: float = 0.01
    """Mean time between two requests."""

    token_s: float = 0.0005
    """Seconds that a stage takes for a token."""

    cancel: float = 0.3
    """Probability that a client goes away at some point."""

    stall: float = 0.0
    """Probability that a chunk never arrives."""

    abandon: float = 0.05
    """Probability that a prompt is not posted to the prefill server after it was reserved."""

    hold: float = 0.3
    """Probability that a prompt is held at the prefill server first, and fetched later."""

    lost_peer: float = 0.2
    """Probability that the connection breaks in a run."""

    crash: float = 0.05
    """Probability that a stage fails in a run; the engine comes up again."""

    has_nan_token: bool = False
    """KV of NAN_TOKEN, and of all positions after it, is NaN."""

    tiers: bool = False
    """Servers have host and disk tiers of random sizes."""

    tier_faults: float = 0.02
    """Probability that a page is not stored, not loaded, changed or lost there."""

    depth: int | None = None
    """Plans in flight beyond one per stage; None draws it. The requests are the same whatever it is."""

    prefills: int = 1
    """Prefill servers of a pair. With several, no router names one: hold is 0."""

    dp: int = 1
    """Data-parallel replicas of each server."""

    lockstep: bool = False
    """They share an exchange."""

    policy: Policy | None = None
    """None takes each of them in turn, by seed. The requests are the same whatever it is."""


def simulate(scenario: Scenario) -> SimulationReport:
    """Run one schedule to its end."""
    return Simulation(scenario).run()


class Simulation:
    """One run: servers and clients are drawn from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = World(scenario.seed)
        self._random = self._world.random
        self._clients = random.Random(scenario.seed)  # the requests must not depend on how fast they are served
        self._report = SimulationReport()
        self._server = self._new_server("decode" if scenario.shape == "pair" else "colocated")
        self._servers = [self._server]
        self._crashed = False
        self._links: dict[str, SimulatedLinks] = {}
        self._prefills: dict[str, SimulatedServer] = {}
        self._attempts: dict[str, PrefillAttempts] = {}  # by rid
        if scenario.shape == "pair":
            backend = (ZMQ, SHM)[scenario.seed % 2]
            for number in range(scenario.prefills):
                self._add_prefill("prefill" if number == 0 else f"prefill{number}", backend)
            self._server.on_output = self._on_decode_output
            self._server.on_peer = self._on_peer
            if backend == SHM:
                self._server.on_restart = self._lose_all  # its hellos describe other pools
        self._texts = [tuple(self._clients.randrange(VOCABULARY) for _ in range(60)) for _ in range(3)]

    def run(self) -> SimulationReport:
        """Run until nothing happens any more."""
        when = 0.0
        for number in range(self._scenario.requests):
            when += self._random.expovariate(1 / self._scenario.arrivals_s)
            self._world.at(when, lambda number=number: self._arrive(number))  # type: ignore[misc]
        for chance, act in ((self._scenario.lost_peer, self._lose_peer), (self._scenario.crash, self._crash)):
            if self._random.random() < chance:
                self._world.at(self._random.uniform(0.01, 2 * when), act)
        if not self._world.run(MAX_EVENTS):
            self._server.violation("the schedule does not end")
        for server in self._servers:
            server.finish()
            if not self._crashed and f"{server.name}:stage_failed" in self._report.outcomes:
                server.violation("the watchdog declared a stage silent that was not")
        self._report.seconds = self._world.now
        return self._report

    def _add_prefill(self, name: str, backend: str) -> None:
        prefill = self._prefills[name] = self._new_server(name, self._server.config)
        self._servers.append(prefill)
        self._links[name] = SimulatedLinks(self._world, prefill, self._server, self._scenario.stall, backend)
        self._server.send(AddPrefill(name=name, endpoint="simulated"))
        prefill.on_output = lambda output: self._on_prefill_output(name, output)

    def _new_server(self, name: str, other: SchedulerConfig | None = None) -> SimulatedServer:
        rng = self._random
        config = SchedulerConfig(
            page_size=rng.choice([1, 2, 4, 8]),
            max_model_len=64,
            vocab_size=VOCABULARY,
            stages=rng.choice([1, 1, 2, 3]),
            pipeline_depth=rng.choice([0, 1, 2]),
            chunk_tokens=rng.choice([4, 8, 16, 64]),
            max_running=rng.choice([2, 4, 16]),
            metadata_rows=rng.choice([1, 3, 16]),
            max_queued_tokens=rng.choice([100, 100_000]),
            prefix_cache=rng.random() < 0.8,
            bootstrap_timeout_s=1.0,
            transfer_timeout_s=0.5,
            stage_timeout_s=60.0,
            hold_lease_s=0.1,
            hold_limit_s=0.4,
            hold_percent=rng.choice([30, 100]),
            optimistic_start=rng.random() < 0.5,
            eviction=("lru", "turns")[self._scenario.seed % 2],
        )
        if self._scenario.depth is not None:
            config = msgspec.structs.replace(config, pipeline_depth=self._scenario.depth)
        config = msgspec.structs.replace(
            config,
            policy=self._scenario.policy or POLICIES[self._scenario.seed % len(POLICIES)],
            refuse_unreachable=self._scenario.seed % 5 == 4,
            max_queued_s=0.2 if self._scenario.seed % 11 == 3 else 0.0,
            max_predicted_ttft_s=0.1 if self._scenario.seed % 13 == 6 else 0.0,
            policy_reserve=(0.0, 0.1, 0.5, 1.0)[self._scenario.seed // len(POLICIES) % 4],
            tenant_lag_s=(0.0, 0.01, 5.0)[self._scenario.seed % 3],
        )
        tokens = rng.choice([48, 96, 256])  # below max_model_len some requests fill the whole pool
        config = msgspec.structs.replace(config, kv_pages=tokens // config.page_size)
        if other is not None and rng.random() < 0.5:
            config = msgspec.structs.replace(config, page_size=other.page_size, kv_pages=other.kv_pages)
        host_pages = disk_pages = 0
        if self._scenario.tiers:
            host_pages, disk_pages = rng.choice([(4, 0), (30, 0), (0, 30), (4, 10), (10, 40), (200, 200)])
            config = msgspec.structs.replace(config, disk_admission_turn=rng.choice([0, 0, 1]))
        config = msgspec.structs.replace(config, dp=self._scenario.dp, lockstep=self._scenario.lockstep)
        return SimulatedServer(
            self._world,
            name,
            config,
            self._scenario.token_s,
            self._report,
            has_nan_token=self._scenario.has_nan_token,
            checks_chunks=self._scenario.seed % 3 > 0,
            host_pages=host_pages,
            disk_pages=disk_pages,
            tier_faults=self._scenario.tier_faults,
        )

    def _arrive(self, number: int) -> None:
        rng = self._clients
        prompt = self._draw_prompt()
        pair = self._scenario.shape == "pair"
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 8, 20, 60]),
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 3, 20]))),
        )
        submit = Submit(
            rid=f"r{number}",
            prompt=pack(prompt),
            sampling=sampling,
            route=self._draw_route(number),
            deadline_s=rng.uniform(0.01, 2.0) if rng.random() < 0.1 else None,
            cache_salt=rng.choice(["", "", "tenant"]),
            progress=rng.random() < 0.5,
            priority=number % 5 % 3,
            tenant=("", "", "other")[number % 3],
            slo_ttft_s=(None, 0.01, 0.1)[number % 7 % 3],
            replica=number // 7 % self._scenario.dp if number % 7 == 5 else None,
        )
        client = SimulatedClient(submit, prompt)
        alone = self._scenario.prefills == 1
        if pair and alone and rng.random() < self._scenario.hold:
            self._post(client, hold=True)
        else:
            self._server.submit(client)
        if rng.random() < self._scenario.cancel:
            finish = rng.random() < 0.3
            self._world.after(rng.choice([0.002, 0.02, 0.1]), lambda: self._cancel(client, finish))
        if pair and alone and rng.random() < 0.3:  # a router that calls both sides at once
            self._post(client)

    def _draw_route(self, number: int) -> AnyRoute:
        """In a pair every request is fetched; alone, some are dropped after the first token."""
        if self._scenario.shape == "pair":
            return FetchFrom(list(self._prefills)[number % len(self._prefills)], f"t{number}")
        return DecodeHere() if self._clients.random() < 0.8 else Discard()

    def _draw_prompt(self) -> tuple[int, ...]:
        """A prefix of a common text and an ending of its own, so that prompts share pages."""
        rng = self._clients
        shared = rng.choice(self._texts)[: rng.choice([0, 5, 16, 33, 50])]
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 13]))]
        return (*shared, *own)

    def _cancel(self, client: SimulatedClient, finish: bool) -> None:
        client.finished_early = finish
        self._server.send(Abort(rid=client.submit.rid, finish=finish))

    def _post(self, client: SimulatedClient, hold: bool = False) -> None:
        """Post the prompt to the prefill server, once: as the decode server's front end, or (hold) as a router."""
        submit = client.submit
        assert isinstance(submit.route, FetchFrom), "in a pair every request is fetched"
        prefill = self._prefills[submit.route.prefill]
        if submit.rid in prefill.clients:
            return
        there = msgspec.structs.replace(submit, route=SendTo(_ticket(client), hold))
        posted = SimulatedClient(there, client.prompt)
        self._world.after(0.002, lambda: self._posted(prefill, posted))
        if hold:
            self._follow_hold(client)

    def _follow_hold(self, client: SimulatedClient) -> None:
        """Renew the ticket of a held prompt or not, and fetch, release or abort it early or late, or do nothing."""
        rng, world = self._random, self._world
        ticket, link = _ticket(client), self._links["prefill"]
        for _ in range(rng.choice([0, 0, 1, 6])):
            world.after(rng.choice([0.02, 0.2]), lambda: link.renew(ticket))
        fate = rng.random()
        if fate < 0.7:
            world.after(rng.choice([0.001, 0.02, 0.1, 0.5]), lambda: self._server.submit(client))
        elif fate < 0.8:
            world.after(0.05, lambda: link.release(ticket))
        elif fate < 0.9:
            prefill, rid = self._prefills["prefill"], client.submit.rid
            world.after(0.05, lambda: prefill.send(Abort(rid=rid)))

    def _posted(self, prefill: SimulatedServer, client: SimulatedClient) -> None:
        if client.submit.rid not in prefill.clients:
            prefill.submit(client)

    def _on_peer(self, effect: Effect) -> None:
        """Lead an effect of the decode server to the connection that it is for."""
        match effect:
            case ConnectPrefill(name=name):
                self._links[name].from_control_client(effect)
            case AskReserve() | AskCancel():
                known = (link for link in self._links.values() if link.knows(effect.session))
                next(known, self._links["prefill"]).from_control_client(effect)
            case _:
                pass

    def _on_decode_output(self, output: SchedulerReply) -> None:
        if isinstance(output, Reserved):
            if self._random.random() >= self._scenario.abandon:
                self._post(self._server.clients[output.rid])
        elif isinstance(output, RequestFailed):
            route = self._server.clients[output.rid].submit.route
            assert isinstance(route, FetchFrom), "in a pair every request is fetched"
            if self._random.random() < 0.8:
                self._prefills[route.prefill].send(Abort(rid=output.rid))
            if len(self._prefills) > 1:
                self._move(output, route)

    def _move(self, failed: RequestFailed, route: FetchFrom) -> None:
        """Submit a request again as the front end does, if its prefill server failed it and there is another one."""
        client = self._server.clients[failed.rid]
        attempts = self._attempts.setdefault(failed.rid, PrefillAttempts())
        attempts.failed(route.prefill, failed.error)
        others = [name for name in self._prefills if name not in attempts.servers]
        if client.tokens or not attempts.may_move or not others:
            return
        client.ends.clear()
        again = FetchFrom(self._random.choice(others), f"{route.ticket}+")
        client.submit = msgspec.structs.replace(client.submit, route=again, moved=True)
        self._report.moves += 1
        self._server.send(client.submit)

    def _on_prefill_output(self, name: str, output: SchedulerReply) -> None:
        """The front end learns from its POST that the prefill server has failed a prompt."""
        if isinstance(output, RequestFailed):
            client = self._server.clients.get(output.rid)
            if client is not None and client.submit.route != FetchFrom(name, _ticket(client)):
                return  # it was moved: the POST was given up
            code, text = f"prefill_{output.error.code}", output.error.message
            error = ErrorInfo(code=code, message=text, status=502, at_prefill=True)
            self._server.send(Abort(rid=output.rid, error=error))

    def _lose_peer(self) -> None:
        if self._links:
            names = list(self._links)
            self._links[names[0] if len(names) == 1 else self._random.choice(names)].lose()

    def _lose_all(self) -> None:
        for link in self._links.values():
            link.lose()

    def _crash(self) -> None:
        self._crashed = True
        server: SimulatedServer = self._random.choice(self._servers)
        server.crash()


def _ticket(client: SimulatedClient) -> str:
    route = client.submit.route
    assert isinstance(route, FetchFrom), "in a pair every request is fetched"
    return route.ticket
