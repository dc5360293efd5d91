"""Routes by which routers learn about a server: identity, control endpoint, computing health, load."""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import Config, DecoderChoice
from headrace.core.config.server import Role
from headrace.core.stats import Stats, join
from headrace.core.types.peers.addresses import url
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.core.version import headrace_version
from headrace.server.api.description.operation import WORK_ERRORS, described
from headrace.server.api.operations.health import StatusReply
from headrace.server.api.response.usage import Count
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.link.control_address import ControlAddress, wrong_role
from headrace.server.frontend.request.generation_request import GenerationRequest, discard_events
from headrace.server.frontend.served_model import ServedModel
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.http.error_response import error_response
from headrace.server.http.streaming import JsonAnswer, json_response
from headrace.server.telemetry.engine_gauges import engine_gauges

PROBE_TIMEOUT_S = 20.0


class VersionReply(msgspec.Struct):
    """Of GET /version."""

    version: str


class LoadReply(msgspec.Struct):
    """Of a data-parallel rank, as SGLang's GET /get_load has it."""

    dp_rank: int
    num_reqs: Count
    num_waiting_reqs: Count
    num_tokens: Count
    kv_pages: Count
    """Of all replicas."""
    kv_pages_used: Count
    """By requests; cached ones are free."""
    cache_hit_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    """Share of the prompt tokens of all requests so far that were cached; null before the first."""


class ServerInfoReply(msgspec.Struct):
    """Of GET /server_info."""

    model_path: str
    model_id: str
    served_model_name: str
    version: str
    instance_id: str
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int | None
    tp_size: int
    dp_size: int
    """1: replicas share an address."""
    data_parallel_replicas: int
    """--dp: how many of them there are."""
    pp_size: int
    kv_block_size: int
    page_size: int
    max_model_len: int
    max_total_num_tokens: int
    adapters: dict[str, str]
    """Fingerprints of the LoRA adapters of --lora by name."""
    decoder: DecoderChoice
    """What computes the model: native or library; auto where external stages choose."""
    same_bits: bool | None
    """Whether a trial of the library's decoder gave the same bits in chunks and beside another request; null: none was
    made."""


class ModelInfoReply(msgspec.Struct):
    """Of GET /model_info."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_model_len: int


_HEALTH_GENERATE = described("Whether a token can be computed", reply=StatusReply, errors=WORK_ERRORS)
_QUERY = described(
    "Where the control endpoint is, for Mooncake's peers", reply=dict[str, Any], errors=(404, 503), audience="everyone"
)


def discovery_routes(model: ServedModel, control: ControlAddress, config: Config) -> APIRouter:
    """What this server is, under the names that SGLang, vLLM and Dynamo give these routes."""
    router = APIRouter()

    @router.get("/server_info", openapi_extra=described("What this server is", reply=ServerInfoReply))
    @router.get("/get_server_info", openapi_extra=described("The same", reply=ServerInfoReply))
    async def server_info() -> Response:
        return json_response(_server_info(model, control, config))

    @router.get("/model_info", openapi_extra=described("The model that is served", reply=ModelInfoReply))
    @router.get("/get_model_info", openapi_extra=described("The same", reply=ModelInfoReply))
    async def model_info() -> Response:
        return json_response(
            ModelInfoReply(
                model_path=model.path,
                tokenizer_path=model.path,
                served_model_name=model.name,
                is_generation=True,
                max_model_len=model.max_model_len,
            )
        )

    @router.get("/version", openapi_extra=described("The release", reply=VersionReply))
    async def version() -> Response:
        return json_response(VersionReply(headrace_version()))

    return router


def load_routes(readiness: Readiness, completions: Completions, stats: StatsCollector, config: Config) -> APIRouter:
    """Whether this server computes and how loaded it is, under the names that SGLang and vLLM give these routes."""
    router = APIRouter()

    @router.get("/ping", openapi_extra=described("GET /ready under another name", reply=dict[str, Any], errors=(503,)))
    async def ping() -> Response:
        problem = readiness.not_ready()
        return json_response({}) if problem is None else error_response(problem)

    @router.get("/health_generate", openapi_extra=_HEALTH_GENERATE)
    async def health_generate() -> Response:
        """200 if one token could be computed just now; its KV is dropped."""
        terms = RequestTerms(deadline_s=min(PROBE_TIMEOUT_S, config.scheduler.stage_timeout_s))
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        rid = f"health-{secrets.token_hex(16)}"
        probe = GenerationRequest(rid=rid, prompt=(0,), sampling=sampling, terms=terms)

        async def work() -> StatusReply:
            await completions.prefill(probe, discard_events)
            return StatusReply("ok")

        return JsonAnswer(work)

    @router.get("/get_load", openapi_extra=described("How loaded this server is", reply=list[LoadReply]))
    async def get_load() -> Response:
        """A list with one entry for each data-parallel rank, of which there is one, as in SGLang."""
        return json_response([_load(completions.open_requests, join(await stats.snapshot()))])

    return router


def bootstrap_routes(control: ControlAddress, role: Role) -> APIRouter:
    """GET /query, by which Mooncake's peers and routers find a prefill server. Needs no key."""
    router = APIRouter()

    @router.get("/query", openapi_extra=_QUERY)
    async def query(http: Request) -> Response:
        if role != "prefill":
            raise wrong_role(role)
        info = control.require()
        host = control.host(http.url.hostname or "")
        worker = {"engine_id": info.instance, "worker_addr": {"0": {"0": url("tcp", host, info.control_port)}}}
        return json_response({"0": worker})

    return router


def _load(open_requests: int, stats: Stats) -> LoadReply:
    values = {(sample.name, *sample.labels): int(sample.value) for sample in stats.samples}
    engine = engine_gauges([stats])
    prompts = values.get(("prompt_tokens_total",), 0)
    return LoadReply(
        dp_rank=0,
        num_reqs=open_requests,
        num_waiting_reqs=values.get(("queue_requests", "waiting"), 0),
        num_tokens=sum(value for (name, *_), value in values.items() if name == "queue_tokens"),
        kv_pages=int(engine.pages),
        kv_pages_used=int(engine.leased_pages),
        cache_hit_rate=values.get(("cached_tokens_total",), 0) / prompts if prompts else None,
    )


def _server_info(model: ServedModel, control: ControlAddress, config: Config) -> ServerInfoReply:
    """Fields that routers look for; a block of the prefix cache is a page."""
    info, server = control.server_info, config.server
    page_size = config.engine.page_size
    kv_pages = info.stages.kv_pages if info is not None and info.stages is not None else 0
    return ServerInfoReply(
        model_path=model.path,
        model_id=model.name,
        served_model_name=model.name,
        version=headrace_version(),
        instance_id=info.instance if info is not None else "",
        disaggregation_mode="null" if server.role == "colocated" else server.role,
        disaggregation_bootstrap_port=server.bootstrap_port or None,
        tp_size=config.scheduler.tp,
        dp_size=1,
        data_parallel_replicas=config.scheduler.dp,
        pp_size=config.scheduler.stages,
        kv_block_size=page_size,
        page_size=page_size,
        max_model_len=model.max_model_len,
        max_total_num_tokens=kv_pages * page_size,
        adapters=info.stages.adapters if info is not None and info.stages is not None else {},
        decoder=config.model.decoder,
        same_bits=info.stages.same_bits if info is not None and info.stages is not None else None,
    )
