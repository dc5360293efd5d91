"""The simulator: runs schedulers under virtual time with random delays, cancels, lost peers and crashed stages.

    colocated:   clients ─► server (some requests are dropped after the first token)
    pair:        clients ─► decode server ─► its front end ─► prefill server ─► chunks ─► decode server
                 and prefixes from any server to any other (Scenario.prefixes), of turns that have ended, too (returns)

A run follows from its seed. All that must hold whatever the schedule is checked as it happens, and violations are
collected.
"""

import random
from collections.abc import Callable
from functools import partial

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, AddPrefill, KvHint, ListKvFiles, Submit
from headrace.core.messages.peers import AskCancel, AskRenew, AskReserve, ConnectPrefill
from headrace.core.messages.replies import RequestFailed, RequestFinished, Reserved, SchedulerReply, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.core.types.kv.kv_files import KvFile
from headrace.core.types.packed import pack
from headrace.core.types.requests.kv_hints import Demote, Keep, Prefetch, Release, Retain
from headrace.core.types.requests.request import AnyRoute, DecodeHere, Discard, FetchFrom, SamplingParams, SendTo
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Effect
from headrace.server.routing.failover import PrefillAttempts
from headrace.testing.engine import NAN_TOKEN, VOCABULARY, EngineOptions
from headrace.testing.link import SimulatedLinks
from headrace.testing.scenario import Scenario, draw_config
from headrace.testing.server import SimulatedClient, SimulatedServer, SimulationReport
from headrace.testing.tiers import location_of
from headrace.testing.world import World

MAX_EVENTS = 200_000
LOOKS = 5  # for KV files
ALONG_S = 0.03  # for KV that a moved prompt takes along, before it is posted


def simulate(scenario: Scenario) -> SimulationReport:
    """Run one schedule to its end."""
    return Simulation(scenario).run()


class Simulation:
    """One run: servers and clients are drawn from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = World(scenario.seed)
        self._random = self._world.random
        self._skipped = frozenset(scenario.skipped)
        self._clients = random.Random(scenario.seed)  # the requests must not depend on how fast they are served
        self._report = SimulationReport()
        self._server = self._new_server("decode" if scenario.shape == "pair" else "colocated")
        self._servers = [self._server]
        self._crashed = False
        self._links: dict[str, SimulatedLinks] = {}
        self._prefills: dict[str, SimulatedServer] = {}
        self._attempts: dict[str, PrefillAttempts] = {}  # by rid
        self._hedged: dict[str, str] = {}  # rids of a prompt's two requests, by each other
        self._returns: set[str] = set()  # rids of KV that comes back, at both servers
        self._prefixes: dict[str, tuple[SimulatedServer, SimulatedServer]] = {}  # by rid: who fetches, and from where
        if scenario.shape == "pair":
            backend = (ZMQ, SHM)[scenario.seed % 2]
            for number in range(scenario.prefills):
                self._add_prefill("prefill" if number == 0 else f"prefill{number}", backend)
            self._server.on_output = self._on_decode_output
            self._server.on_peer = self._on_peer
            if backend == SHM:
                self._server.on_restart = self._lose_all  # its hellos describe other pools
            if scenario.prefixes or scenario.resumes:
                self._connect_all(backend)
        self._texts = [
            tuple(self._clients.randrange(VOCABULARY) for _ in range(60 // scenario.scale)) for _ in range(3)
        ]

    def run(self) -> SimulationReport:
        """Run until nothing happens any more."""
        when = 0.0
        for number in range(self._scenario.requests):
            when += self._random.expovariate(1 / self._scenario.arrivals_s)
            self._world.at(when, lambda number=number: self._arrive(number))  # type: ignore[misc]
        for number in range(self._scenario.prefixes):
            self._world.at(self._random.uniform(0.01, 2 * when), partial(self._fetch_prefix, number))
        for number in range(LOOKS if self._scenario.library else 0):
            self._act(f"look for KV files {number}", self._list_files, number * 1.5 * when / LOOKS)
        for what, chance, act in (
            ("connection breaks", self._scenario.lost_peer, self._lose_peer),
            ("stage fails", self._scenario.crash, self._crash),
        ):
            if self._random.random() < chance:
                self._act(what, act, self._random.uniform(0.01, 2 * when))
        if not self._world.run(MAX_EVENTS):
            self._server.violation("the schedule does not end")
        for server in self._servers:
            server.finish()
            if not self._crashed and f"{server.name}:stage_failed" in self._report.outcomes:
                server.violation("the watchdog declared a stage silent that was not")
        self._report.seconds = self._world.now
        return self._report

    def _list_files(self) -> None:
        """Every server finds KV files of some of the texts."""
        rng = self._random
        for server in self._servers:
            size, files = server.config.page_size, {}
            for text in self._texts * 2:
                tokens = text[: size * rng.choice([1, 2, 3, 6])]
                if self._scenario.has_nan_token and NAN_TOKEN in tokens:
                    tokens = tokens[: tokens.index(NAN_TOKEN)]
                tokens = tokens[: len(tokens) // size * size]
                if tokens and rng.random() < 0.6:
                    files[tokens] = KvFile(location_of(tokens), b"", pack(tokens))
            server.send(ListKvFiles(files=tuple(files.values())))

    def _add_prefill(self, name: str, backend: str) -> None:
        prefill = self._prefills[name] = self._new_server(name, self._server.config)
        self._servers.append(prefill)
        self._links[name] = SimulatedLinks(self._world, prefill, self._server, self._scenario.stall, backend)
        self._server.send(AddPrefill(name=name, endpoint="simulated"))
        prefill.on_output = lambda output: self._on_prefill_output(name, output)

    def _connect_all(self, backend: str) -> None:
        """Let every server fetch prefixes from every other one."""
        for client in self._servers:
            client.on_peer = self._on_peer
            for other in self._servers:
                name = f"{client.name} from {other.name}"
                if client is other or (client is self._server and other.name in self._links):
                    continue
                self._links[name] = SimulatedLinks(self._world, other, client, self._scenario.stall, backend, name)
                client.send(AddPrefill(name=name, endpoint="simulated"))
            if backend == SHM:
                client.on_restart = self._lose_all

    def _fetch_prefix(self, number: int) -> None:
        """Have a server fetch the beginning of a text that another one has had."""
        rng = self._random
        client, other = rng.sample(self._servers, 2)
        name = f"{client.name} from {other.name}"
        name = name if name in self._links else other.name
        known = [one.prompt + tuple(one.tokens) for one in other.clients.values()] or self._texts
        text = rng.choice(known)
        tokens = text[: client.config.page_size * rng.choice([1, 1, 2, 3, 6])]
        submit = Submit(
            rid=f"x{number}",
            prompt=pack(tokens),
            sampling=SamplingParams(max_tokens=1),
            route=FetchFrom(name, f"x{number}", prefix=True, spare=number % 3 == 1),
            terms=RequestTerms(cache_salt=rng.choice(["", "", "tenant"])),
        )
        self._prefixes[submit.rid] = (client, other)
        self._act(f"fetch prefix {submit.rid}", lambda: client.submit(SimulatedClient(submit, tokens)))
        if rng.random() < self._scenario.cancel:
            self._act(f"cancel {submit.rid}", lambda: client.send(Abort(rid=submit.rid)), mean_s=0.02)

    def _return(self, client: SimulatedClient) -> None:
        """Have the prefill server of a turn that has ended take its KV, or lose the answer that says so on its way."""
        route = client.submit.route
        assert isinstance(route, FetchFrom), "in a pair every request is fetched"
        if self._random.random() >= self._scenario.returns:
            return
        prefill, text = self._prefills[route.prefill], client.prompt + tuple(client.tokens)
        tokens = text[: (len(text) - 1) // prefill.config.page_size * prefill.config.page_size]
        if not tokens:
            return
        self._offer(client, tokens, f"back-{client.submit.rid}")

    def _take_along(self, client: SimulatedClient, cached: int) -> bool:
        """Have the next prefill server of a moved prompt take what has come of its KV; False if it is not offered."""
        submit = client.submit
        if not submit.moved or not self._scenario.resumes or self._random.random() >= self._scenario.resumes:
            return False
        route = submit.route
        assert isinstance(route, FetchFrom), "in a pair every request is fetched"
        tokens = client.prompt[: cached - cached % self._prefills[route.prefill].config.page_size]
        if tokens:
            self._report.taken_along += 1
            self._offer(client, tokens, f"along-{route.ticket}")
        return bool(tokens)

    def _hedge(self, client: SimulatedClient) -> None:
        """Start a second prefill server on a prompt, which goes on from what has come of the first one's KV."""
        submit, route = client.submit, client.submit.route
        others = [name for name in self._prefills if isinstance(route, FetchFrom) and name != route.prefill]
        hedges = self._scenario.hedges
        if not hedges or submit.follows or submit.moved or not others or self._random.random() >= hedges:
            return
        rid = f"h{submit.rid}"
        self._hedged |= {rid: submit.rid, submit.rid: rid}
        there = FetchFrom(self._random.choice(others), rid)
        second = msgspec.structs.replace(submit, rid=rid, route=there, follows=submit.rid)
        self._act(f"hedge {rid}", lambda: self._server.submit(SimulatedClient(second, client.prompt)), mean_s=0.02)

    def _offer(self, client: SimulatedClient, tokens: tuple[int, ...], rid: str) -> None:
        """Have the prefill server of a request take KV from the decode server, unless one of the two does not come."""
        rng, decode, route = self._random, self._server, client.submit.route
        assert isinstance(route, FetchFrom), "in a pair every request is fetched"
        prefill = self._prefills[route.prefill]
        there = FetchFrom(f"{prefill.name} from {decode.name}", rid, "external", prefix=True)
        terms = RequestTerms(cache_salt=client.submit.terms.cache_salt)
        taken = Submit(rid=rid, prompt=pack(tokens), sampling=SamplingParams(max_tokens=1), route=there, terms=terms)
        given = msgspec.structs.replace(taken, route=SendTo(there.ticket, cached=True))
        self._returns.add(rid)
        for server, submit in ((prefill, taken), (decode, given)):
            if rng.random() < self._scenario.abandon:
                continue
            order = partial(server.submit, SimulatedClient(submit, tokens))
            self._act(f"return {rid} at {server.name}", order, mean_s=0.005)
            self._act(f"give up {rid} at {server.name}", partial(server.send, Abort(rid=rid)), mean_s=1.0)

    def _on_prefix(self, server: SimulatedServer, output: SchedulerReply) -> bool:
        """Post a prefix where it is fetched from, and pass on how that fails. False for outputs of other requests."""
        if getattr(output, "rid", "") in self._returns:
            return True
        if not isinstance(output, Reserved | RequestFailed | RequestFinished) or output.rid not in self._prefixes:
            return False
        client, other = self._prefixes[output.rid]
        if server is client and isinstance(output, Reserved):
            if self._random.random() >= self._scenario.abandon:
                mine = client.clients[output.rid]
                there = msgspec.structs.replace(mine.submit, route=SendTo(_ticket(mine), cached=True))
                self._world.after(0.002, lambda: self._posted(other, SimulatedClient(there, mine.prompt)))
        elif server is other and isinstance(output, RequestFailed):
            error = ErrorInfo(code="prefill_failed", message=output.error.message, status=502, at_prefill=True)
            client.send(Abort(rid=output.rid, error=error))
        return True

    def _new_server(self, name: str, other: SchedulerConfig | None = None) -> SimulatedServer:
        scenario, rng = self._scenario, self._random
        config = draw_config(scenario, rng, other)
        host_pages = disk_pages = 0
        if scenario.tiers:
            host_pages, disk_pages = rng.choice([(4, 0), (30, 0), (0, 30), (4, 10), (10, 40), (200, 200)])
            config = msgspec.structs.replace(config, disk_admission_turn=rng.choice([0, 0, 1]))
        options = EngineOptions(
            token_s=scenario.token_s,
            has_nan_token=scenario.has_nan_token,
            host_pages=host_pages,
            disk_pages=disk_pages,
            tier_faults=scenario.tier_faults,
            states=scenario.states,
            cancels=scenario.seed % 4 > 0,
        )
        return SimulatedServer(self._world, name, config, options, self._report)

    def _act(self, what: str, action: Callable[[], None], at: float | None = None, mean_s: float | None = None) -> None:
        """Do something that comes from outside, under a number, unless that is to be skipped. at: when. mean_s: mean of
        the random delay, which is drawn even if it is skipped. Neither of them: now."""
        number = len(self._report.actions)
        self._report.actions.append(what)
        if mean_s is not None:
            at = self._world.delayed(mean_s)
        if number in self._skipped:
            return
        if at is None:
            action()
        else:
            self._world.at(at, action)

    def _arrive(self, number: int) -> None:
        rng = self._clients
        prompt = self._draw_prompt()
        pair = self._scenario.shape == "pair"
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 8, 20, 60] if self._scenario.scale == 1 else [1, 2, 3, 5, 12]),
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 3, 20]))),
        )
        route = self._draw_route(number)
        submit = Submit(
            rid=f"r{number}",
            prompt=pack(prompt),
            sampling=sampling,
            route=route,
            terms=RequestTerms(
                deadline_s=rng.uniform(0.01, 2.0) if rng.random() < 0.1 else None,
                cache_salt=rng.choice(["", "", "tenant"]),
                priority=number % 5 % 3,
                tenant=("", "", "other")[number % 3],
                slo_ttft_s=(None, 0.01, 0.1)[number % 7 % 3],
                keep_tokens=number * 5 % 48 if isinstance(route, Discard) and number % 2 else None,
                replica=number // 7 % self._scenario.dp if number % 7 == 5 else None,
                retain=Retain(seconds=(0.01, 0.1, 10.0)[number % 3], priority=number % 2) if number % 4 > 1 else None,
                demote=number % 7 == 3,
                let_go=number % 9 == 4,
                session=("", "s", f"s{number % 5}")[number % 11 % 3],
            ),
            progress=rng.random() < 0.5,
            audit=(None, 0.0, 0.5, 0.99)[number % 4],
        )
        client = SimulatedClient(submit, prompt)
        if number % 5 == 1:
            self._hint(number, submit)
        if pair and self._scenario.rooms and rng.random() < self._scenario.rooms:
            self._call_both(client)
            return
        alone, rid = self._scenario.prefills == 1, submit.rid
        if self._scenario.opened and rng.random() < self._scenario.opened:
            self._open(client)
        if pair and alone and rng.random() < self._scenario.hold:
            self._post(client, hold=True)
        else:
            self._act(f"submit {rid}", lambda: self._server.submit(client))
        if rng.random() < self._scenario.cancel:
            finish = rng.random() < 0.3
            mean_s = rng.choice([0.002, 0.02, 0.1])
            self._act(f"cancel {rid}", lambda: self._cancel(client, finish), mean_s=mean_s)
        if pair and alone and rng.random() < 0.3:  # a router that calls both sides at once
            self._post(client)

    def _open(self, client: SimulatedClient) -> None:
        """Submit beginnings of a prompt as pieces of an open prompt, at a server of the run, and finish some of them
        early, or cancel them."""
        rng, submit = self._clients, client.submit
        server = rng.choice(self._servers)
        ends = sorted(rng.randrange(1, len(client.prompt) + 1) for _ in range(rng.choice([1, 2, 4])))
        for number, end in enumerate(ends):
            terms = RequestTerms(cache_salt=submit.terms.cache_salt, tenant=submit.terms.tenant)
            piece = SimulatedClient(
                Submit(
                    rid=f"{submit.rid}.{number}",
                    prompt=pack(client.prompt[:end]),
                    sampling=SamplingParams(max_tokens=1),
                    route=Discard(),
                    terms=terms,
                    progress=rng.random() < 0.5,
                    open=True,
                    digest=(end // 4, end // 2) if number % 2 and end > 3 else None,
                ),
                client.prompt[:end],
            )
            mean_s = 0.01 * (number + 1)
            self._act(f"open {piece.submit.rid}", lambda piece=piece: server.submit(piece), mean_s=mean_s)  # type: ignore[misc]
            if rng.random() < 0.5:
                abort = Abort(rid=piece.submit.rid, finish=rng.random() < 0.7)
                piece.finished_early = abort.finish
                mean_s += rng.choice([0.001, 0.01])
                self._act(f"end {piece.submit.rid}", lambda abort=abort: server.send(abort), mean_s=mean_s)  # type: ignore[misc]

    def _hint(self, number: int, submit: Submit) -> None:
        """As an agent framework that says what becomes of a prompt's KV: before the request, meanwhile or after it."""
        actions = (Keep(seconds=0.05), Prefetch(seconds=0.1, priority=1), Demote(), Release(), Keep(seconds=10.0))
        chosen = (actions[number % 5], actions[number % 7 % 5])
        hint = KvHint(token=number, prompt=submit.prompt, terms=submit.terms, actions=chosen)
        for server in self._servers:
            delay = 0.004 * (number % 11)
            self._act(f"hint {submit.rid}", lambda server=server: server.send(hint), at=self._world.now + delay)  # type: ignore[misc]

    def _call_both(self, client: SimulatedClient) -> None:
        """As a router that sends the request to both servers at once, under a room."""
        submit = client.submit
        route = msgspec.structs.replace(submit.route, posting="external")
        client.submit = msgspec.structs.replace(submit, route=route)
        self._act(f"submit {submit.rid}", lambda: self._server.submit(client))
        if self._random.random() >= self._scenario.abandon:
            self._post(client)
        if self._clients.random() < self._scenario.cancel:
            mean_s = self._clients.choice([0.002, 0.02, 0.1, 1.0])
            self._act(f"cancel {submit.rid}", lambda: self._cancel(client, finish=False), mean_s=mean_s)

    def _draw_route(self, number: int) -> AnyRoute:
        """In a pair every request is fetched; alone, some are dropped after the first token."""
        if self._scenario.shape == "pair":
            return FetchFrom(list(self._prefills)[number % len(self._prefills)], f"t{number}")
        return DecodeHere() if self._clients.random() < 0.8 else Discard()

    def _draw_prompt(self) -> tuple[int, ...]:
        """A prefix of a common text and an ending of its own, so that prompts share pages."""
        rng = self._clients
        scale = self._scenario.scale
        lengths = [0, 5, 16, 33, 50] if scale == 1 or not self._scenario.tiers else [0, 32, 40, 48, 48]
        shared = rng.choice(self._texts)[: rng.choice(lengths) // scale]
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 13]) // scale or 1)]
        prompt = [*shared, *own]
        if self._scenario.has_nan_token and self._scenario.small and rng.random() < 0.4:  # else short ones have none
            prompt[rng.randrange(len(prompt))] = NAN_TOKEN
        return tuple(prompt)

    def _cancel(self, client: SimulatedClient, finish: bool) -> None:
        client.finished_early = finish
        self._server.send(Abort(rid=client.submit.rid, finish=finish))

    def _post(self, client: SimulatedClient, hold: bool = False, local: bool = False) -> None:
        """Post the prompt to the prefill server, once: as a router, or (local) as the decode server's front end."""
        submit = client.submit
        assert isinstance(submit.route, FetchFrom), "in a pair every request is fetched"
        prefill = self._prefills[submit.route.prefill]
        if submit.rid in prefill.clients:
            return
        there = msgspec.structs.replace(submit, route=SendTo(_ticket(client), hold))
        prompt = client.prompt
        if self._scenario.other_prompt and not local and self._random.random() < self._scenario.other_prompt:
            prompt = (*prompt, 1)
            there = msgspec.structs.replace(there, prompt=pack(prompt))
        posted = SimulatedClient(there, prompt)
        self._act(f"post {submit.rid}", lambda: self._posted(prefill, posted), mean_s=0.002)
        if hold:
            self._follow_hold(client)

    def _follow_hold(self, client: SimulatedClient) -> None:
        """Renew the ticket of a held prompt or not, and fetch, release or abort it early or late, or do nothing."""
        rng = self._random
        ticket, rid, link = _ticket(client), client.submit.rid, self._links["prefill"]
        for _ in range(rng.choice([0, 0, 1, 6])):
            self._act(f"renew {ticket}", lambda: link.renew(ticket), mean_s=rng.choice([0.02, 0.2]))
        fate = rng.random()
        if fate < 0.7:
            mean_s = rng.choice([0.001, 0.02, 0.1, 0.5])
            self._act(f"fetch {rid}", lambda: self._server.submit(client), mean_s=mean_s)
        elif fate < 0.8:
            self._act(f"release {ticket}", lambda: link.release(ticket), mean_s=0.05)
        elif fate < 0.9:
            prefill = self._prefills["prefill"]
            self._act(f"abort {rid} at the prefill server", lambda: prefill.send(Abort(rid=rid)), mean_s=0.05)

    def _post_again(self, reserved: Reserved) -> None:
        """Post what a preempted request has got so far, or do not."""
        client = self._server.clients[reserved.rid]
        if self._random.random() < self._scenario.abandon:
            error = ErrorInfo(code="prefill_failed", message="the prompt was refused", status=502, at_prefill=True)
            self._act(f"refuse {reserved.ticket}", lambda: self._server.send(Abort(rid=reserved.rid, error=error)))
            return
        tokens = (*client.prompt, *client.tokens)[: reserved.tokens]
        submit = Submit(
            rid=reserved.ticket,
            prompt=pack(tokens),
            sampling=SamplingParams(max_tokens=2),
            route=SendTo(reserved.ticket),
            terms=client.submit.terms,
        )
        route = client.submit.route
        assert isinstance(route, FetchFrom), "in a pair every request is fetched"
        self._posted(self._prefills[route.prefill], SimulatedClient(submit, tokens, again=True))

    def _posted(self, prefill: SimulatedServer, client: SimulatedClient) -> None:
        if client.submit.rid not in prefill.clients:
            prefill.submit(client)

    def _on_peer(self, effect: Effect) -> None:
        """Lead an effect of the decode server to the connection that it is for."""
        match effect:
            case ConnectPrefill(name=name):
                self._links[name].connect()
            case AskReserve() | AskCancel() | AskRenew():
                known = (link for link in self._links.values() if link.knows(effect.session))
                next(known, self._links["prefill"]).from_control_client(effect)
            case _:
                pass

    def _on_decode_output(self, output: SchedulerReply) -> None:
        if self._on_prefix(self._server, output):
            return
        if isinstance(output, RequestFinished) and self._scenario.returns:
            self._return(self._server.clients[output.rid])
        if isinstance(output, Reserved) and output.ticket:
            self._post_again(output)
        elif isinstance(output, Tokens):
            if (other := self._hedged.pop(output.rid, None)) is not None:
                self._hedged.pop(other)
                self._server.send(Abort(rid=other))
        elif isinstance(output, Reserved):
            self._hedge(self._server.clients[output.rid])
            route = self._server.clients[output.rid].submit.route
            if isinstance(route, FetchFrom) and route.posting != "local":
                return  # its router posts it
            if self._random.random() >= self._scenario.abandon:
                client = self._server.clients[output.rid]
                if self._take_along(client, output.cached):
                    self._world.after(ALONG_S, lambda: self._post(client, local=True))
                else:
                    self._post(client, local=True)
        elif isinstance(output, RequestFailed) and not self._server.clients[output.rid].submit.open:
            route = self._server.clients[output.rid].submit.route
            assert isinstance(route, FetchFrom), "in a pair every request is fetched"
            if self._random.random() < 0.8:
                self._prefills[route.prefill].send(Abort(rid=output.rid))
            if len(self._prefills) > 1 and not self._server.clients[output.rid].submit.follows:
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
        if self._on_prefix(self._prefills[name], output):
            return
        if isinstance(output, RequestFailed):
            if self._prefills[name].clients[output.rid].submit.open:
                return
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
