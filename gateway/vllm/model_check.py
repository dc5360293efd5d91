"""Compares the models of decode engines and prefill servers by the first token of a few prompts.

Equal geometry and an equal name do not say that the weights are equal: KV of other weights gives wrong texts.
"""

import asyncio
import logging
from collections.abc import Sequence

import httpx
import msgspec

from headrace.core.messages.http_prefill import JSON_HEADERS, PREFILL_PATH, PrefillRequest
from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.gateway.vllm.engine_client import EngineClient
from headrace.gateway.vllm.engines import DecodeEngines
from headrace.integrations.http_client import bearer, direct_async_client

log = logging.getLogger(__name__)

PROMPTS = ((11, 7, 23, 5), (42, 17, 8, 31, 29, 3, 12), (19, 2, 37, 13, 41, 6, 28, 22, 9, 33))  # ids of any vocabulary
ALTERNATIVES = 5
TIMEOUT_S = 60.0
# Differences of a logprob that rounding does not explain. In bfloat16 one model on both sides, whose kernels round in
# different places, was measured to differ by 0.30 at most over 15 prompts, by 0.08 over these.
TOLERANCES = {"float32": 0.02, "bfloat16": 0.75, "float16": 0.25}
_TOKEN_ID = "token_id:"

Logprobs = dict[int, float]
"""Of the most likely first tokens, by id; the most likely one first."""


class _Alternative(msgspec.Struct):
    id: int
    logprob: float


class _FirstToken(msgspec.Struct):
    top_logprobs: list[_Alternative]


class _Prefilled(msgspec.Struct):
    first_token: _FirstToken


class _ChoiceLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    logprobs: _ChoiceLogprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def check_models(engines: DecodeEngines, prefill_url: str, api_key: str, dtype: str) -> None:
    """Compare each decode engine with a prefill server; other prefill servers have the same fingerprint. What cannot be
    compared is logged. dtype: of both sides. Raises ConfigError, naming both first tokens, for another model."""
    try:
        ours = await asyncio.gather(*(_prefilled(prefill_url, api_key, prompt) for prompt in PROMPTS))
        for engine in engines.all:
            theirs = await asyncio.gather(*(_completed(engine.client, prompt) for prompt in PROMPTS))
            if different := difference(ours, theirs, TOLERANCES[dtype]):
                raise ConfigError(
                    f"the model of prefill server {prefill_url} is not that of decode engine {engine.url}: "
                    f"{different}. Serve the same weights on both sides (--no-model-check skips this comparison)"
                )
    except (HeadraceError, httpx.HTTPError, TimeoutError) as error:
        log.warning("the models of decode engines and prefill servers were not compared: %s", error)


def difference(ours: Sequence[Logprobs], theirs: Sequence[Logprobs], tolerance: float) -> str:
    """What shows that two models differ, in words; "" for nothing. ours: of the prefill server, for each prompt."""
    for prompt, prefill, decode in zip(PROMPTS, ours, theirs, strict=True):
        if max(_gap(prefill, decode), _gap(decode, prefill)) > tolerance:
            return f"after the tokens {list(prompt)} the first one is {_shown(prefill)} and {_shown(decode)}"
    return ""


def _gap(one: Logprobs, other: Logprobs) -> float:
    """Difference in the logprob of the most likely token of one; at least that, if the other does not report it."""
    token, logprob = next(iter(one.items()))
    return abs(logprob - other[token]) if token in other else max(0.0, logprob - min(other.values()))


def _shown(logprobs: Logprobs) -> str:
    token, logprob = next(iter(logprobs.items()))
    return f"{token} (logprob {logprob:.4f})"


async def _prefilled(url: str, api_key: str, prompt: Sequence[int]) -> Logprobs:
    """Raises HeadraceError, httpx.HTTPError."""
    body = PrefillRequest(prompt_token_ids=prompt, handoff="none", max_tokens=1, temperature=0.0, logprobs=ALTERNATIVES)
    async with direct_async_client(headers=bearer(api_key), timeout=TIMEOUT_S) as http:
        answer = await http.post(url + PREFILL_PATH, content=body.encoded(), headers=JSON_HEADERS)
    answer.raise_for_status()
    try:
        tops = msgspec.json.decode(answer.content, type=_Prefilled).first_token.top_logprobs
    except NO_MESSAGE as error:
        raise httpx.DecodingError(f"POST /v1/prefill of {url}: {error}") from error
    return _sorted({top.id: top.logprob for top in tops}, f"prefill server {url}")


async def _completed(client: EngineClient, prompt: Sequence[int]) -> Logprobs:
    """Raises HeadraceError, httpx.HTTPError."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": ALTERNATIVES}
    body["return_tokens_as_token_ids"] = True
    try:
        completion = msgspec.json.decode(await client.complete(body), type=_Completion)
        tops = completion.choices[0].logprobs.top_logprobs[0]
        found = {int(name.removeprefix(_TOKEN_ID)): logprob for name, logprob in tops.items()}
    except (*NO_MESSAGE, IndexError, ValueError) as error:
        raise httpx.DecodingError(f"POST /v1/completions of {client.url}: {error}") from error
    return _sorted(found, f"decode engine {client.url}")


def _sorted(logprobs: Logprobs, where: str) -> Logprobs:
    if not logprobs:
        raise httpx.DecodingError(f"{where} reports no logprobs")
    return dict(sorted(logprobs.items(), key=lambda item: -item[1]))
