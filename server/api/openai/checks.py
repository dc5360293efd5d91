"""Bodies of OpenAI's routes, tokenized and checked: what they ask for as a CompletionRequest."""

import secrets

import msgspec

from headrace.core.types.errors import invalid
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.request import SamplingParams
from headrace.server.api.openai.echo import check_echo
from headrace.server.api.openai.responses_format import refuse_unsupported_responses
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.constraint import body_constraint
from headrace.server.api.request.prompts import (
    check_model,
    completion_prompts,
    encode_all,
    encode_chat,
    encode_reported,
    input_messages,
    response_template_use,
    template_use,
)
from headrace.server.api.request.reasoning import answer_use
from headrace.server.api.request.sampling import (
    chat_logprobs_wanted,
    check_logprobs_start,
    generated_choices,
    sampling_params,
)
from headrace.server.api.request.schema import ChatBody, CompletionBody, OpenAIBody, ResponsesBody, StreamOptions
from headrace.server.api.request.terms import base_request, with_images
from headrace.server.api.request.tools import (
    ToolUse,
    forced_calls,
    response_tool_use,
    tool_use,
    with_free_calls,
)
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.served_model import ServedModel
from headrace.server.upstream.handoff_params import prompt_ids

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; for chat it is the rest of the model's length


async def check_completion(model: ServedModel, client: str, body: CompletionBody) -> CompletionRequest:
    """The prompts, tokenized and checked. Raises HeadraceError (400, 404)."""
    generated, wanted = generated_choices(body), body.n or 1
    check_echo(body)
    logprobs = 0 if body.logprobs is None and generated > wanted else body.logprobs  # what they are ranked by
    constraint = await _check(model, client, body)
    prompts = completion_prompts(body.prompt, model.max_model_len)
    sampling = sampling_params(body, logprobs=logprobs, max_tokens=COMPLETION_TOKENS, vocab_size=model.vocab_size)
    given = prompt_ids(body, len(prompts)) or prompts
    tokens = await encode_all(model, given, "prompt", indexed=len(prompts) > 1)
    check_logprobs_start(sampling, tokens)
    base = _base_request("cmpl", body, sampling, constraint)
    base = msgspec.structs.replace(base, prompt_only=body.prompt_only)
    return CompletionRequest(base, tokens, generated, best=wanted)


async def check_chat(model: ServedModel, client: str, body: ChatBody) -> CompletionRequest:
    """The conversation, tokenized and checked. Raises HeadraceError (400, 404)."""
    tools = tool_use(model, body)
    constraint = await _check(model, client, body, tools)
    sampling = sampling_params(
        body,
        logprobs=chat_logprobs_wanted(body),
        max_tokens=model.max_model_len or COMPLETION_TOKENS,
        vocab_size=model.vocab_size,
    )
    given = prompt_ids(body, 1)
    if given:
        tokens, images = await encode_reported(model, given[0], body.messages, "messages")
    else:
        functions = tools.functions if tools else {}
        tokens, images = await encode_chat(model, body.messages, functions=functions, use=template_use(body))
    check_logprobs_start(sampling, [tokens])
    answers, constraint = await answer_use(model, client, body, tokens, tools, constraint)
    base = with_images(_base_request("chatcmpl", body, sampling, constraint), images)
    base = msgspec.structs.replace(base, shown=answers.shown(model))
    return CompletionRequest(base, [tokens], body.n or 1, answers=answers)


async def check_response(model: ServedModel, client: str, body: ResponsesBody) -> CompletionRequest:
    """The input, tokenized and checked. Raises HeadraceError (400, 404)."""
    refuse_unsupported_responses(body)
    tools = response_tool_use(model, body)
    constraint = await _check(model, client, body, tools)
    limit = model.max_model_len or COMPLETION_TOKENS
    sampling = sampling_params(body, logprobs=None, max_tokens=limit, vocab_size=model.vocab_size)
    messages, places = await input_messages(body)
    if given := prompt_ids(body, 1):
        tokens, images = await encode_reported(model, given[0], messages, "input", places)
    else:
        functions = tools.functions if tools else {}
        tokens, images = await encode_chat(
            model,
            messages,
            "input",
            instructions=body.instructions,
            functions=functions,
            places=places,
            use=response_template_use(body),
        )
    check_logprobs_start(sampling, [tokens])
    answers, constraint = await answer_use(model, client, body, tokens, tools, constraint)
    base = with_images(_base_request("resp", body, sampling, constraint), images)
    base = msgspec.structs.replace(base, shown=answers.shown(model))
    return CompletionRequest(base, [tokens], answers=answers)


async def _check(model: ServedModel, client: str, body: OpenAIBody, tools: ToolUse | None = None) -> Constraint | None:
    """What all bodies have in common; returns their constraint, or that of calls that have to be made."""
    check_model(model, body.model)
    constraint = await body_constraint(model, client, body, await forced_calls(model, client, tools))
    if tools is not None and not tools.forced:
        constraint = await with_free_calls(model, client, tools, constraint)
        if constraint is not None and body.ignore_eos:
            raise invalid("ignore_eos", "ignore_eos and strict tools contradict each other; send one of them")
    return constraint


def _base_request(
    prefix: str, body: OpenAIBody, sampling: SamplingParams, constraint: Constraint | None
) -> GenerationRequest:
    """What all choices of one response have in common."""
    options = body.stream_options or StreamOptions()
    progress = bool(body.stream and options.include_progress)
    return base_request(f"{prefix}-{secrets.token_hex(16)}", body, sampling, constraint, progress=progress)
