"""The simulated model: the "KV" of a position is a hash of all tokens up to it, and gives the next token."""

MODULUS = (1 << 61) - 1
VOCABULARY = 61
NAN = -2  # KV of a position with NaN, and of all positions after it
NAN_TOKEN = 60  # the token whose KV is NaN, in scenarios that have one


def extend(state: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return NAN if state == NAN else (state * 1_000_003 + token + 7) % MODULUS


def next_token(state: int) -> int:
    """The token that follows a prefix with this hash."""
    return state % VOCABULARY


def expected_tokens(prompt: tuple[int, ...], max_tokens: int, stop: tuple[int, ...], min_tokens: int) -> list[int]:
    """The tokens that a request must generate, from its prompt alone."""
    state = 0
    for token in prompt:
        state = extend(state, token)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = next_token(state)
        tokens.append(token)
        if token in stop and len(tokens) >= min_tokens:
            break
        state = extend(state, token)
    return tokens
