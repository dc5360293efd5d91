"""Hidden states and prompt logprobs of a request, which the scheduler reports in parts."""

import asyncio

from headrace.core.messages.replies import HiddenPart, LogprobPart
from headrace.core.types.draft import HiddenStates
from headrace.core.types.prompt_logprobs import LogprobRun, unpacked
from headrace.core.types.request import TokenLogprob
from headrace.server.frontend.request.hidden_states import joined

FEW_RUNS = 2  # are unpacked in the event loop


class PromptParts:
    """Collects the parts of one request."""

    def __init__(self) -> None:
        self._states: list[HiddenStates] = []
        self._runs: list[LogprobRun] = []

    def add(self, part: HiddenPart | LogprobPart) -> None:
        """Take in the next part."""
        if isinstance(part, HiddenPart):
            self._states.append(part.states)
        else:
            self._runs.append(part.run)

    def hidden(self, end: int) -> HiddenStates | None:
        """Hidden states of the positions before end; None for none. Raises HeadraceError (500) as joined() does."""
        return joined(self._states, end)

    async def logprobs(self, prompt_tokens: int) -> tuple[TokenLogprob | None, ...]:
        """One entry for each prompt token, or nothing where none were asked for; many are unpacked beside the event
        loop."""
        if len(self._runs) <= FEW_RUNS:
            return unpacked(self._runs, prompt_tokens)
        return await asyncio.to_thread(unpacked, self._runs, prompt_tokens)
