"""POST /v1/score as in SGLang, POST /generative_scoring as in vLLM, POST /v1/rerank as in vLLM, Jina and Cohere."""

import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import Config
from headrace.core.runtime.clock import wall_time
from headrace.core.types.requests.request import SamplingParams
from headrace.server.api.description.operation import GENERATION_ERRORS, GENERATION_HEADERS, described
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.prompts import check_model
from headrace.server.api.request.schema import GenerativeScoringBody, RerankBody, SamplingBody, ScoreBody, ScoredBody
from headrace.server.api.request.terms import base_request, with_client_terms
from headrace.server.api.response.usage import MORE, Count, UsageReply, usage_report
from headrace.server.api.scoring.bodies import Scored, documents_of, generative_items_of, score_items_of
from headrace.server.api.scoring.items import ItemScore, score_items, shared_tokens
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import JsonAnswer


class ScoreReply(msgspec.Struct, kw_only=True):
    """Of POST /v1/score."""

    scores: list[list[float]]
    """For each item, a probability for each label."""
    pooled_hidden_states: None = None
    token_logprobs: list[tuple[float, ...]] | None
    """Of the labels, where return_token_logprobs asks for them."""
    model: str
    usage: UsageReply
    object: Literal["scoring"] = "scoring"


class ItemReply(msgspec.Struct):
    """The score of one item."""

    index: Count
    score: float
    object: Literal["score"] = "score"


class GenerativeScoringReply(msgspec.Struct, kw_only=True):
    """Of POST /generative_scoring."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ItemReply]
    usage: UsageReply


class RerankDocument(msgspec.Struct):
    """A document as it was sent."""

    text: str


class RerankResult(msgspec.Struct):
    """How well a document fits the query, from 0 to 1."""

    index: Count
    relevance_score: float
    document: RerankDocument = MORE


class RerankReply(msgspec.Struct):
    """Of POST /v1/rerank: the best documents first."""

    id: str
    model: str
    usage: UsageReply
    results: list[RerankResult]


SCORE_PATH, GENERATIVE_PATH = "/v1/score", "/generative_scoring"
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORING_PATHS = (SCORE_PATH, GENERATIVE_PATH, *RERANK_PATHS)

_SCORE = described(
    "Probabilities of label tokens behind each item, in SGLang's API",
    body=ScoreBody,
    reply=ScoreReply,
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_GENERATIVE = described(
    "The probability of a label token behind each item, in vLLM's API",
    body=GenerativeScoringBody,
    reply=GenerativeScoringReply,
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_RERANK = described(
    "Documents by how well they fit a query",
    body=RerankBody,
    reply=RerankReply,
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
B = TypeVar("B", bound=ScoredBody)
Answer = Callable[[str, str, Sequence[ItemScore]], object]  # the response, of its id, the model's name and the scores


def score_routes(model: ServedModel, completions: Completions, config: Config, budget: BodyBudget) -> APIRouter:
    """Work that ends with the prompt; in every role, and computed by this server itself."""
    router = APIRouter()

    async def receive(http: Request, kind: type[B]) -> B:
        body = await decode_body(await read_body(http, config.server.max_body_bytes, budget), kind)
        check_model(model, body.model)
        return body

    async def respond(
        http: Request, body: ScoredBody, scored: Awaitable[Scored], prefix: str, answer: Answer
    ) -> Response:
        head, items = await scored
        terms = {name: getattr(body, name) for name in ScoredBody.__struct_fields__}
        rid = f"{prefix}-{secrets.token_hex(16)}"
        base = with_client_terms(base_request(rid, SamplingBody(**terms), SamplingParams(), None), http, config.server)
        shared = shared_tokens(head, items, config.engine.page_size)
        name = model.called(body.model or "")

        async def work() -> object:
            return answer(rid, name, await score_items(completions, base, items, shared))

        return JsonAnswer(work)

    @router.post(SCORE_PATH, openapi_extra=_SCORE)
    async def score(http: Request) -> Response:
        body = await receive(http, ScoreBody)
        return await respond(http, body, score_items_of(model, body), "score", partial(_scores, body))

    @router.post(GENERATIVE_PATH, openapi_extra=_GENERATIVE)
    async def generative_scoring(http: Request) -> Response:
        body = await receive(http, GenerativeScoringBody)
        scored = generative_items_of(model, body)
        return await respond(http, body, scored, "generative-scoring", partial(_generative_scores, body))

    async def rerank(http: Request) -> Response:
        body = await receive(http, RerankBody)
        return await respond(http, body, documents_of(model, body), "rerank", partial(_reranked, body))

    for path in RERANK_PATHS:
        router.add_api_route(path, rerank, methods=["POST"], openapi_extra=_RERANK)
    return router


def _scores(body: ScoreBody, _rid: str, model: str, found: Sequence[ItemScore]) -> ScoreReply:
    softmax, temperature = bool(body.apply_softmax), body.temperature or 1.0
    return ScoreReply(
        scores=[probabilities(item.logprobs, softmax=softmax, temperature=temperature) for item in found],
        token_logprobs=[item.logprobs for item in found] if body.return_token_logprobs else None,
        model=model,
        usage=_usage(found),
    )


def _generative_scores(
    body: GenerativeScoringBody, rid: str, model: str, found: Sequence[ItemScore]
) -> GenerativeScoringReply:
    softmax = body.apply_softmax is not False
    scores = [probabilities(item.logprobs, softmax=softmax)[0] for item in found]
    data = [ItemReply(index, score) for index, score in enumerate(scores)]
    return GenerativeScoringReply(id=rid, created=int(wall_time()), model=model, data=data, usage=_usage(found))


def _reranked(body: RerankBody, rid: str, model: str, found: Sequence[ItemScore]) -> RerankReply:
    return RerankReply(rid, model, _usage(found), _ranked(body, found))


def probabilities(logprobs: Sequence[float], *, softmax: bool, temperature: float = 1.0) -> list[float]:
    """Of labels with these logprobs: among the labels alone (softmax), or among all tokens."""
    if not softmax:
        return [math.exp(logprob) for logprob in logprobs]
    most = max(logprobs)
    weights = [math.exp((logprob - most) / temperature) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _usage(found: Sequence[ItemScore]) -> UsageReply:
    """Nothing is generated."""
    return usage_report([item.usage for item in found], 0)


def _ranked(body: RerankBody, found: Sequence[ItemScore]) -> list[RerankResult]:
    """The results that a body asks for, best first; equal ones in the order of their documents."""
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    shown = body.return_documents is not False
    results = [
        RerankResult(index, probabilities(item.logprobs, softmax=True)[0], RerankDocument(text) if shown else MORE)
        for index, (text, item) in enumerate(zip(documents, found, strict=True))
    ]
    results.sort(key=lambda result: -result.relevance_score)
    return results[: body.top_n] if body.top_n else results
