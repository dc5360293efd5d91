"""Hidden states and prompt logprobs of a request, which the scheduler reports in parts."""

from headrace.core.messages.replies import HiddenPart, LogprobPart
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.prompt_logprobs import PackedLogprobs
from headrace.server.frontend.request.hidden_states import joined


class PromptParts:
    """Collects the parts of one request."""

    def __init__(self, prompt_tokens: int) -> None:
        self._states: list[HiddenStates] = []
        self.logprobs = PackedLogprobs(prompt_tokens)
        """Empty where none were asked for."""

    def add(self, part: HiddenPart | LogprobPart) -> None:
        """Take in the next part."""
        if isinstance(part, HiddenPart):
            self._states.append(part.states)
        else:
            self.logprobs.add(part.run)

    def hidden(self, end: int) -> HiddenStates | None:
        """Hidden states of the positions before end; None for none. Raises HeadraceError (500) as joined() does."""
        return joined(self._states, end)
