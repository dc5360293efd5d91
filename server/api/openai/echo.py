"""echo of POST /v1/completions: the prompt before its completion, and its logprobs before those of the completion."""

from collections.abc import Sequence

import msgspec

from headrace.core.types.errors import invalid
from headrace.core.types.requests.request import TokenLogprob
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.prompts import completion_prompts
from headrace.server.api.request.schema import CompletionBody
from headrace.server.api.response.choices import Choice, Output
from headrace.server.frontend.request.generation_request import GenerationRequest, GenerationResult
from headrace.text.tokenizer import Tokenizer


def check_echo(body: CompletionBody) -> None:
    """Raises HeadraceError (400) for fields that do not go with echo, or with what needs it."""
    if body.prompt_only:
        if not body.echo:
            raise invalid("max_tokens", "max_tokens is 0; without echo it has to be at least 1")
        if body.stream:
            raise invalid("stream", "max_tokens 0 generates nothing to stream; leave out stream")
    if not body.echo or body.logprobs is None:
        return
    if body.stream:
        message = "echo with logprobs is not streamed: those of the prompt are known at the end; leave out stream"
        raise invalid("stream", message)
    if body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "echo with logprobs gives those of the prompt; leave out prompt_logprobs")


class Echo:
    """The prompts of one HTTP request. index: position of a choice in the response."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        completion: CompletionRequest,
        requests: Sequence[GenerationRequest],
    ) -> None:
        """Raises HeadraceError (400) if the prompts' logprobs will not come to this server: they are in the prefill
        server's answer to the router that has asked it."""
        if body.logprobs is not None and requests[0].sampling.prompt_logprobs is None:
            message = "behind a router that asks a prefill server, echo has no logprobs; ask a decode server directly"
            raise invalid("echo", message, code="unsupported")
        self._tokenizer = tokenizer
        self._given = completion_prompts(body.prompt)
        self._prompts = completion.prompts
        self._choices = completion.returned

    def text(self, index: int) -> str:
        """The prompt as it was given; of token ids, what they say."""
        prompt = self._given[index // self._choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def logprobs(self, index: int, result: GenerationResult) -> list[tuple[int, TokenLogprob | None]]:
        """The tokens of the prompt and their logprobs, which the first one does not have, nor those before
        prompt_logprobs_start."""
        prompt = self._prompts[index // self._choices]
        return list(zip(prompt, result.prompt_logprobs or (None,) * len(prompt), strict=True))


def without_completion(output: Output) -> Output:
    """An output as if nothing had been generated, for max_tokens 0."""
    result = output[1]
    usage = msgspec.structs.replace(result.usage, completion_tokens=0)
    return Choice(), msgspec.structs.replace(result, usage=usage, finish_reason="length")
