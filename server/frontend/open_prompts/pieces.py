"""Pieces of open prompts that this server computes."""

from headrace.core.messages.frontend import open_piece
from headrace.core.messages.replies import Progress, RequestFinished
from headrace.core.types.packed import pack
from headrace.server.frontend.link.call import Call
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.open_prompts.open_prompts import OnComputed, OpenPiece, OpenPrompt
from headrace.server.frontend.request.generation_request import GenerationRequest


class LocalPiece:
    """A request of the scheduler that ends without a token."""

    def __init__(self, client: SchedulerClient, request: GenerationRequest) -> None:
        self._client = client
        self._call: Call | None = None
        self._finished = False
        self._submit = open_piece(request.rid, pack(request.prompt), request.terms)

    async def run(self, on_computed: OnComputed) -> None:
        """Compute it to its end. Raises HeadraceError."""
        async with self._client.open(self._submit) as call:
            self._call = call
            if self._finished:
                call.finish()
            while not isinstance(event := await call.next(), RequestFinished):
                if isinstance(event, Progress):
                    on_computed(event.done)

    def finish(self) -> None:
        """End it with the pass that it is in."""
        self._finished = True
        if self._call is not None:
            self._call.finish()


class LocalPieces:
    """Pieces of all open prompts of a server that computes prompts itself."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    def piece(self, prompt: OpenPrompt, request: GenerationRequest) -> OpenPiece:
        """A piece of a prompt. request: with its tokens."""
        return LocalPiece(self._client, request)

    async def closed(self, prompt: OpenPrompt) -> None:
        """Nothing is left of it."""

    async def stop(self) -> None:
        """Nothing is done but for pieces."""
