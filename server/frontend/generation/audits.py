"""Audits: a page of KV that a prefill server has sent is computed again by another one, and digests are compared.

    decode server                                          another prefill server
    Submit(audit) ─► … ─► first pass ─► KvDigested
         └─ POST /v1/audits: tokens up to the page's end ─► Submit(open, digest) under a salt of its own ─► KvDigested
       equal, or a line in the log with both servers ◄──────────┘

The prompt is computed from its first token on, by the lowest class of work: nothing of any prefix cache is used for it.
Both servers have to say that they compute the same bits (computation_key), or nothing is compared.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from random import Random
from weakref import WeakValueDictionary

import httpx
import msgspec

from headrace.core.config import Config
from headrace.core.messages.frontend import KvHint, Submit
from headrace.core.messages.http_prefill import JSON_HEADERS
from headrace.core.messages.replies import KvDigested, RequestFinished, StagePools
from headrace.core.runtime.background import Tasks
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types import refusals
from headrace.core.types.errors import NOT_NOW, ErrorInfo, HeadraceError
from headrace.core.types.kv.kv_digests import comparable, differing
from headrace.core.types.packed import pack
from headrace.core.types.requests.audits import AUDITS_PATH, AuditResult
from headrace.core.types.requests.kv_hints import Release
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

AUDIT_S = 120.0  # for the answer of a server that may have better things to do
LATE_S = 1.0  # for a digest, after the end of its request: stages report in any order
SHOWN = 8  # layers that differ, in the log


class AuditAnswer(msgspec.Struct, frozen=True):
    """The answer to POST /v1/audits."""

    computation: str
    """What the bits depend on, see computation_key()."""
    digest: dict[str, tuple[str, ...]]
    """See KvDigest."""


def computation_key(config: Config, pools: StagePools | None) -> str | None:
    """All that the bits of KV depend on beside model and prompt, in words; None where they depend on more than that,
    such as the batch. Equal keys and fingerprints mean equal bits."""
    engine = config.engine
    plain = engine.mla in ("auto", "absorbed") and config.scheduler.prefix_cache
    if pools is None or not (pools.reproducible and plain and len(pools.computations) == 1):
        return None
    found = pools.computations[0]
    by = "native" if pools.same_bits is None else "library"
    words = (
        *(f"{name} {getattr(found, name)}" for name in found.__struct_fields__),
        f"decoder {by}",
        f"tp {config.scheduler.tp}",
    )
    return ", ".join(words)


class PrefillAudits:
    """Audits a share of the prompts that prefill servers compute for a decode server."""

    def __init__(self, pool: PrefillPool, metrics: FrontMetrics, rate: float, random: Random | None = None) -> None:
        """rate: share of the prompts."""
        self._pool = pool
        self._metrics = metrics
        self._rate = rate
        self._random = random or Random(secrets.randbits(64))
        self._audits = Tasks()
        self._drawn: WeakValueDictionary[str, PageAudit] = WeakValueDictionary()  # by rid, while they are followed

    def draw(self, request: GenerationRequest, server: PrefillServer) -> "PageAudit | None":
        """An audit of what a server is about to compute; None for most prompts."""
        self._drawn.pop(request.rid, None)
        if self._random.random() >= self._rate:
            return None
        if request.images or request.terms.adapter:
            self._metrics.count_audit("unsupported")
            return None
        computation = "" if server.target is None else server.target.computation or ""
        audit = PageAudit(request.prompt, server, computation, self._random.random())
        self._drawn[request.rid] = audit
        return audit

    def take(self, event: KvDigested) -> None:
        """The page of an audit was digested here. Returns at once."""
        audit = self._drawn.pop(event.rid, None)
        if audit is None:
            return
        audit.digested = True
        auditor = self._auditor(audit)
        if isinstance(auditor, str):
            self._metrics.count_audit(auditor)
        elif len(self._audits):
            self._metrics.count_audit("busy")
        else:
            self._audits.start(self._run(audit, event, auditor))

    def ended(self, audit: "PageAudit") -> None:
        """The answer of a prompt that was drawn has ended well: its digest comes within LATE_S, or there is none."""
        asyncio.get_running_loop().call_later(LATE_S, self._without_page, audit)

    def _without_page(self, audit: "PageAudit") -> None:
        if not audit.digested:
            self._metrics.count_audit("no_page")

    async def stop(self) -> None:
        """Give up the audit under way."""
        await self._audits.cancel()

    def _auditor(self, audit: "PageAudit") -> PrefillServer | AuditResult:
        """Another server that computes the same bits, or why there is none."""
        sent = audit.server
        others = [one for one in self._pool.up() if one is not sent and not _same_run(one, sent)]
        if not others:
            return "no_server"
        fit = [one for one in others if one.target is not None and one.target.computation == audit.computation]
        return self._random.choice(fit) if fit and audit.computation else "other_computation"

    async def _run(self, audit: "PageAudit", event: KvDigested, auditor: PrefillServer) -> None:
        result: AuditResult = "failed"
        try:
            result = await self._compare(audit, event, auditor)
        except TimeoutError:
            result = "late"
        except HeadraceError as error:
            result = "busy" if error.info.status in NOT_NOW else "failed"
            log.debug("audit of %s by %s: %s", event.rid, auditor.url, error.info.message)
        except (httpx.HTTPError, *NO_MESSAGE) as error:
            log.debug("audit of %s by %s: %s", event.rid, auditor.url, error)
        self._metrics.count_audit(result)

    async def _compare(self, audit: "PageAudit", event: KvDigested, auditor: PrefillServer) -> AuditResult:
        """Raises TimeoutError, HeadraceError, httpx.HTTPError, and what decoding raises."""
        body = msgspec.json.encode({
            "prompt_token_ids": audit.prompt[: event.end], "start": event.start, "end": event.end,
        })  # fmt: skip
        async with asyncio.timeout(AUDIT_S):
            content = await self._pool.ask(auditor, AUDITS_PATH, body, JSON_HEADERS)
        answer = msgspec.json.decode(content, type=AuditAnswer)
        if answer.computation != audit.computation:  # it has started again since it was found
            return "other_computation"
        if not comparable(event.digest, answer.digest):
            return "failed"
        if not (layers := differing(event.digest, answer.digest)):
            return "equal"
        log.error(
            "audit: the KV of request %s at tokens %d to %d (page %d) differs between %s, which has sent it, and %s, "
            "which has computed it again: in %d layers (%s%s)",
            event.rid, event.start, event.end - 1, event.start // (event.end - event.start), audit.server.url,
            auditor.url, len(layers), ", ".join(layers[:SHOWN]), ", …" if len(layers) > SHOWN else "",
        )  # fmt: skip
        return "different"


class PageAudit:
    """An audit of one prompt."""

    def __init__(self, prompt: tuple[int, ...], server: PrefillServer, computation: str, share: float) -> None:
        self.prompt = prompt
        self.server = server
        """Computes it."""
        self.computation = computation
        """What that server has said of its bits."""
        self.share = share
        """See Submit.audit."""
        self.digested = False


class PageAuditor:
    """Computes pages again, for decode servers that audit other prefill servers: one at a time."""

    def __init__(self, client: SchedulerClient, config: Config) -> None:
        self._client = client
        self._config = config
        self._busy = False
        self._waiting: dict[str, asyncio.Future[KvDigested]] = {}  # by rid

    def take(self, event: KvDigested) -> None:
        """The page was digested."""
        if (waiting := self._waiting.pop(event.rid, None)) is not None and not waiting.done():
            waiting.set_result(event)

    async def answer(self, prompt: Sequence[int], start: int, end: int, tenant: str) -> AuditAnswer:
        """The digest of the KV of a prompt's positions [start, end). Raises HeadraceError: 400 where it says nothing,
        429 while another one is computed, 503 where it was not to be computed."""
        info = self._client.server_info
        computation = computation_key(self._config, None if info is None else info.stages)
        if computation is None:
            text = "the KV of this server is not reproducible: there is nothing to compare it with"
            raise HeadraceError(ErrorInfo(code="unsupported", message=text, status=400))
        if self._busy:
            raise refusals.AUDITS.raised()
        self._busy = True
        try:
            digested = await self._compute(tuple(prompt[:end]), start, end, tenant)
        finally:
            self._busy = False
        if digested is None:
            raise refusals.NOT_AUDITED.raised()
        return AuditAnswer(computation, digested.digest)

    async def _compute(self, prompt: tuple[int, ...], start: int, end: int, tenant: str) -> KvDigested | None:
        """Compute whole pages of tokens under a salt that nothing is cached under; None if they had to give way."""
        page_size = self._config.engine.page_size
        behind = -end % page_size + 1  # of which KV before them does not depend: whole pages are computed, and no more
        tokens = pack((*prompt, *[prompt[-1]] * behind))
        terms = RequestTerms(tenant=tenant, cache_salt=secrets.token_hex(16))
        submit = Submit(
            rid=f"audit-{secrets.token_hex(16)}",
            prompt=tokens,
            sampling=SamplingParams(max_tokens=1),
            route=Discard(),
            terms=terms,
            open=True,
            digest=(start, end),
        )
        digested = self._waiting[submit.rid] = asyncio.get_running_loop().create_future()
        try:
            async with self._client.open(submit) as call:
                while not isinstance(await call.next(), RequestFinished):
                    pass
            return await asyncio.wait_for(digested, LATE_S)
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(submit.rid, None)
            # Nobody else finds it.
            self._client.post(KvHint(token=0, prompt=tokens, terms=terms, actions=(Release(),)))


def _same_run(one: PrefillServer, other: PrefillServer) -> bool:
    """Whether two URLs lead to one server."""
    return one.target is not None and other.target is not None and one.target.instance == other.target.instance
