"""The terms of a request: what its body says, and what holds for all requests of its client (tenant, range of
priorities, headers)."""

import hashlib

import msgspec
from starlette.requests import Request

from headrace.core.config import ServerConfig
from headrace.core.types.errors import invalid, shown
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.images import images_digest
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.tenants import priority_ranges
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.api.request.sampling import ending
from headrace.server.api.request.schema import OpenAIBody, SamplingBody
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.request.images import RequestImage
from headrace.server.frontend.request.kv_hints import with_hints
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.http.ranges import MAX_INT32, MAX_OBJECTIVE_MS

SLO_HEADER = "x-llm-d-slo-ttft-ms"
"""The objective for the first token, as llm-d's gateway sends it. A body's slo_ttft_ms goes before it."""

REPLICA_HEADER = "x-data-parallel-rank"
"""The data-parallel replica, as vLLM's routers name it. A body's data_parallel_rank goes before it."""

MAX_HEADER_CHARS = 32
SESSION_CHARS = 32  # of a digest


def base_request(
    rid: str, body: SamplingBody, sampling: SamplingParams, constraint: Constraint | None, *, progress: bool = False
) -> GenerationRequest:
    """What all prompts and choices of a body have in common; its prompt is empty."""
    ends = ending(body)
    keeps = isinstance(body, OpenAIBody) and (body.include_stop_str_in_output or body.no_stop_trim)
    terms = RequestTerms(
        priority=body.priority or 0,
        slo_ttft_s=None if body.slo_ttft_ms is None else body.slo_ttft_ms / 1000,
        deadline_s=body.deadline_s,
        replica=body.data_parallel_rank,
        cache_salt=prefix_salt(body.cache_salt, body.extra_key),
        session=session_digest(body.session_id or body.prompt_cache_key),
    )
    request = GenerationRequest(
        rid=rid,
        prompt=(),
        sampling=sampling,
        constraint=constraint,
        terms=terms,
        model=body.model or "",
        stop=ends.stop,
        keep_stop=bool(keeps),
        ignore_eos=ends.ignore_eos,
        progress=progress,
    )
    return with_hints(request, body.kv_hints, body.prompt_cache_retention)


def with_images(base: GenerationRequest, images: tuple[RequestImage, ...]) -> GenerationRequest:
    """The request with the images of its prompt."""
    if not images:
        return base
    terms = msgspec.structs.replace(base.terms, image_digest=images_digest(image.input for image in images))
    return msgspec.structs.replace(base, images=images, terms=terms)


def prefix_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """The salt of the prefix cache for a request with these fields; another pair of them gives another salt. With an
    extra_key it is a digest of both, so that it is no longer than a client's salt may be."""
    salt = cache_salt or ""
    if not extra_key:
        return salt
    return hashlib.sha256(f"{len(salt)}:{salt}{extra_key}".encode()).hexdigest()


def session_digest(name: str | None) -> str:
    """A short name for a session of any name; "" for none."""
    return hashlib.sha256(name.encode()).hexdigest()[:SESSION_CHARS] if name else ""


def with_client_terms(request: GenerationRequest, http: Request, config: ServerConfig) -> GenerationRequest:
    """The request, with its ids on other servers, the tenant of its API key, its priority cut to the range that the
    tenant may use, and the objective and the data-parallel rank of the headers if the body has none. Raises
    HeadraceError (400) for a header that is no number."""
    tenant = tenant_of(http)
    terms, ranges = request.terms, priority_ranges(config.priority_ranges)
    low, high = ranges.get(tenant) or ranges.get("") or (terms.priority, terms.priority)
    objective = terms.slo_ttft_s
    if objective is None and (header := http.headers.get(SLO_HEADER)) is not None:
        objective = _header_objective(header)
    replica = terms.replica
    if replica is None and (header := http.headers.get(REPLICA_HEADER)) is not None:
        replica = _header_replica(header)
    priority = min(max(terms.priority, low), high)
    terms = msgspec.structs.replace(terms, tenant=tenant, priority=priority, slo_ttft_s=objective, replica=replica)
    request = msgspec.structs.replace(request, terms=terms)
    record: RequestRecord | None = http.scope.get("state", {}).get("record")
    return request if record is None else msgspec.structs.replace(request, context=record.context, observer=record)


def tenant_of(http: Request) -> str:
    """The tenant whose key the request has, "" for a key without a name and for servers without keys."""
    tenant: str = http.scope.get("state", {}).get("tenant", "")
    return tenant


def client_of(http: Request) -> str:
    """Whom to charge for work before a request is admitted: its tenant, or the host that it comes from if its key has
    no name. Behind a proxy without tenants all clients are one."""
    tenant = tenant_of(http)
    return f"tenant {tenant}" if tenant else f"host {http.client.host if http.client is not None else ''}"


def _header_objective(header: str) -> float:
    """The objective in seconds."""
    try:
        milliseconds = float(header[:MAX_HEADER_CHARS])
    except ValueError:
        raise invalid(SLO_HEADER, f"the header {SLO_HEADER} is {shown(header)!r}; it has to be a number") from None
    if not 0 < milliseconds <= MAX_OBJECTIVE_MS:
        limit = f"it has to be above 0 and at most {MAX_OBJECTIVE_MS:g} milliseconds"
        raise invalid(SLO_HEADER, f"{SLO_HEADER} is {milliseconds:g}; {limit}")
    return milliseconds / 1000


def _header_replica(header: str) -> int:
    """Whether there is such a replica, the scheduler knows."""
    number = int(header) if header.isascii() and header.isdigit() and len(header) <= MAX_HEADER_CHARS else -1
    if not 0 <= number <= MAX_INT32:
        text = f"the header {REPLICA_HEADER} is {shown(header)!r}; it has to be a number from 0 to {MAX_INT32}"
        raise invalid("data_parallel_rank", text)
    return number
