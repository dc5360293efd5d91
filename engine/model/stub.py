"""Stub model: name, sizes and tokenizer of `--model stub`, or `--model stub:layers=8,us_per_token=50`.

It has no weights. Its runner (engine/stub/runner.py) takes a configured time and computes only tokens that reveal
errors, for benchmarks and tests of everything but the model.
"""

import msgspec
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.core.types.errors import ConfigError
from headrace.engine.model.byte_level import byte_level_alphabet
from headrace.engine.model.config import ModelSpec, RopeSpec
from headrace.engine.model.moe_spec import LayerKind, MoeSpec

STUB = "stub"
END = 256  # end-of-sequence token; lower ids are bytes, higher ids are words that only the model generates
CHAT_TEMPLATE = (
    "{% if reasoning_effort %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if not enable_thinking | default(true) %}without thinking\n{% endif %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or () %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class StubModel(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a stub model, as given in its name. A stage takes its layers' share of the times."""

    layers: int = 8
    hidden: int = 64
    """Hidden size: 8 times the heads, or a multiple of that. All heads together are as wide."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    """KV heads; query heads are a multiple of them."""
    vocab: int = 1000
    """Vocabulary size."""
    max_len: int = 131072
    """Positions of the longest sequence."""
    us_per_token: int = 50
    """Microseconds that all layers together take per token."""
    ps_per_token_squared: int = 0
    """Picoseconds that all layers together take per squared token besides, as attention does: a row of n tokens after s
    others takes those of (s + n)² - s²."""
    us_per_plan: int = 0
    """Microseconds that all layers together take per forward pass, besides."""
    experts: int = 0
    """Of every layer; 0: none. They change no token unless rows are lost on their way."""
    top_k: int = 1
    """Experts of each token."""
    us_per_exchange: int = 0
    """Microseconds that the exchanges of all layers together take per token, there and back, where experts are divided
    among replicas. us_per_token is then half attention, half experts."""
    jitter_percent: int = 0
    """Largest random deviation of the time of one forward pass."""
    states: int = 0
    """1: every layer keeps a state of each request besides its KV, as recurrent models do."""
    fault_token: int = 0
    """Prompts that begin with this token and it, or one of the three above it, break a stage (engine/stub/runner.py);
    0: none do."""

    def spec(self) -> ModelSpec:
        """A ModelSpec with heads that are together as wide as the hidden states; sizes that do not matter here are
        minimal."""
        return ModelSpec(
            family=STUB,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.heads,  # a column for each shard that there may be
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            norm_eps=1e-5,
            rope=RopeSpec(),
            max_positions=self.max_len,
            tied=True,
            moe=self._moe(),
            state_bytes=8 * self.states,
        )

    def _moe(self) -> MoeSpec | None:
        if not self.experts:
            return None
        kinds: list[LayerKind] = ["moe"] * self.layers
        return MoeSpec(experts=self.experts, top_k=self.top_k, intermediate_size=1, layer_kinds=tuple(kinds))

    def fingerprint(self) -> str:
        """Fingerprint of what is computed; times do not change it."""
        heads = f" {self.heads} {self.kv_heads}" if self.heads > 1 else ""
        states = " states" if self.states else ""
        return xxhash.xxh3_128_hexdigest(f"{STUB} {self.layers} {self.hidden} {self.vocab}{heads}{states}".encode())


SMALLEST = {"layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1, "vocab": END + 2, "max_len": 1}


def is_stub(model: str) -> bool:
    """Whether --model names a stub model."""
    return model.partition(":")[0] == STUB


def parse_stub(model: str) -> StubModel:
    """Parse the name of a stub model. Raises ConfigError, naming the key, for an unknown key or a bad value."""
    given: dict[str, int] = {}
    for item in filter(None, model.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in StubModel.__struct_fields__:
            known = ", ".join(StubModel.__struct_fields__)
            raise ConfigError(f"--model {model}: there is no {key!r}; a stub has {known}")
        if not value.isascii() or not value.isdigit():
            raise ConfigError(f"--model {model}: {key} must be a whole number, found {value!r}")
        if key in given:
            raise ConfigError(f"--model {model}: {key} is given twice")
        given[key] = int(value)
    made = msgspec.structs.replace(StubModel(), **given)
    for key, least in SMALLEST.items():
        if given.get(key, least) < least:
            raise ConfigError(f"--model {model}: {key} must be {least} or more")
    if made.heads % made.kv_heads:
        raise ConfigError(f"--model {model}: heads must be a multiple of kv_heads, such as {2 * made.kv_heads}")
    if made.hidden % (8 * made.heads):
        fitting = max(16, made.hidden // (8 * made.heads) * 8 * made.heads)
        raise ConfigError(f"--model {model}: hidden must be a multiple of {8 * made.heads}, such as {fitting}")
    if made.experts and not 1 <= made.top_k <= made.experts:
        raise ConfigError(f"--model {model}: top_k must be from 1 to {made.experts}, the experts")
    if made.states > 1:
        raise ConfigError(f"--model {model}: states must be 0 or 1")
    if made.jitter_percent > 100:
        raise ConfigError(f"--model {model}: jitter_percent must be 100 or less")
    return made


def stub_tokenizer(model: str) -> Tokenizer:
    """A byte-level tokenizer: every byte of a text is a token. Raises ConfigError for a bad name."""
    vocab = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    words = {f"Ġw{token}": token for token in range(END + 1, parse_stub(model).vocab)}
    made = Tokenizer(models.BPE(vocab={**vocab, "<end>": END, **words}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made
