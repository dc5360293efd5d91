"""What came of one request, as its client saw it."""

import msgspec

OK = "ok"
INTERRUPTED = "interrupted"


class BenchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent. Times are seconds since the start of the measurement."""

    due_s: float
    """When it was to be sent; latencies count from here."""
    sent_s: float
    """When the client began to send it."""
    token_s: tuple[float, ...]
    """When each event with text arrived, the first token's first."""
    last_s: float
    """When the last token arrived, whether it had text or not."""
    ended_s: float
    input_tokens: int
    cached_tokens: int
    """Prompt tokens that the server took from its prefix cache."""
    output_tokens: int
    status: str
    """"ok"; else why it failed: HTTP status and error code, "timeout", "connection lost", …"""
    message: str = ""
    """The server's message of a failure."""

    @property
    def ok(self) -> bool:
        """Whether all tokens arrived."""
        return self.status == OK

    @property
    def ttft_s(self) -> float:
        """Time to first token, of one that is ok."""
        return self.token_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From due to the end of the response."""
        return self.ended_s - self.due_s

    @property
    def lag_s(self) -> float:
        """How late the client sent it."""
        return self.sent_s - self.due_s
