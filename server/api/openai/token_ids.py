"""return_token_ids of OpenAI's completions and chat completions: token ids beside the text, where vLLM has them."""

from collections.abc import Sequence
from typing import Any

from headrace.server.api.openai.replies import ChatChoice, ChatChunkChoice, ChoicesReply, CompletionChoice
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.response.choices import Choice
from headrace.server.frontend.request.generation_request import GenerationDelta

AnyChoice = CompletionChoice | ChatChoice | ChatChunkChoice


class ReturnedTokenIds:
    """prompt_token_ids and token_ids of one response. index: position of a choice in it.

    The ids of a choice's prompt are in the choice for completions, which may have several prompts, and in the response
    for chats. What is generated while there is nothing to say of it goes with the next chunk.
    """

    def __init__(self, completion: CompletionRequest) -> None:
        self._prompts = completion.prompts
        self._choices_per_prompt = completion.returned
        self._pending: dict[int, list[int]] = {}
        self._told: set[int] = set()  # choices whose prompt was told in the stream

    def into_reply(self, reply: ChoicesReply, outputs: Sequence[Choice]) -> None:
        """Add the ids to a whole response. outputs: what was generated for each of its choices."""
        for index, (choice, output) in enumerate(zip(reply.choices, outputs, strict=True)):
            choice.token_ids = output.sampled
            self._add_prompt(reply, choice, index)

    def generated(self, index: int, delta: GenerationDelta) -> None:
        """Note ids for the next chunk of a choice."""
        self._pending.setdefault(index, []).extend((*delta.tokens, *delta.end_tokens))

    def waiting(self, index: int) -> bool:
        """Whether there are ids for the next chunk of a choice."""
        return bool(self._pending.get(index))

    def into_chunk(self, chunk: ChoicesReply, index: int) -> None:
        """Add to a chunk of one choice the ids that are new, and to the first one those of the prompt."""
        (choice,) = chunk.choices
        choice.token_ids = self._pending.pop(index, [])
        if index not in self._told:
            self._told.add(index)
            self._add_prompt(chunk, choice, index)

    def _add_prompt(self, reply: Any, choice: AnyChoice, index: int) -> None:
        holder = choice if isinstance(choice, CompletionChoice) else reply
        holder.prompt_token_ids = self._prompts[index // self._choices_per_prompt]
