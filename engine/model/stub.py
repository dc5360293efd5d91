"""The stub model's name, sizes and tokenizer: `stub`, or `stub:layers=8,us_per_token=50`.

It has no weights: it takes a set time and computes nothing but checks (engine/stub_runner.py), for benchmarks and
tests of everything around a model.
"""

import msgspec
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.core.types.errors import ConfigError
from headrace.engine.model.byte_level import byte_level_alphabet
from headrace.engine.model.config import ModelSpec, RopeSpec

STUB = "stub"
END = 256  # ends a text; ids below are bytes, ids above are words that only the model says
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class StubModel(msgspec.Struct, frozen=True, kw_only=True):
    """layers, hidden, vocab: sizes as in a model's configuration. max_len: positions in a sequence.

    us_per_token and us_per_plan: microseconds that all layers together take for a token and for a forward pass; a
    stage takes its layers' share. jitter_percent: how far the time of one forward pass may be off, at random.
    """

    layers: int = 8
    hidden: int = 64
    vocab: int = 1000
    max_len: int = 131072
    us_per_token: int = 50
    us_per_plan: int = 0
    jitter_percent: int = 0

    def spec(self) -> ModelSpec:
        """One KV head as wide as the hidden states, and the least of everything that does not matter here."""
        return ModelSpec(
            family=STUB,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=1,
            layers=self.layers,
            heads=1,
            kv_heads=1,
            head_dim=self.hidden,
            norm_eps=1e-5,
            rope=RopeSpec(),
            max_positions=self.max_len,
            tied=True,
        )

    def fingerprint(self) -> str:
        """Names what is computed; the time that it takes stays out of it."""
        return xxhash.xxh3_128_hexdigest(f"{STUB} {self.layers} {self.hidden} {self.vocab}".encode())


LEAST = {"layers": 1, "hidden": 16, "vocab": END + 2, "max_len": 1, "us_per_token": 0, "us_per_plan": 0}


def is_stub(model: str) -> bool:
    """Whether --model names a stub."""
    return model.partition(":")[0] == STUB


def parse_stub(model: str) -> StubModel:
    """Raises ConfigError for a key or a value that is wrong, naming it."""
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
    for key, least in LEAST.items():
        if given.get(key, least) < least:
            raise ConfigError(f"--model {model}: {key} must be {least} or more")
    if made.hidden % 8:
        raise ConfigError(f"--model {model}: hidden must be a multiple of 8, such as {made.hidden // 8 * 8}")
    if made.jitter_percent > 100:
        raise ConfigError(f"--model {model}: jitter_percent must be 100 or less")
    return made


def stub_tokenizer(model: str) -> Tokenizer:
    """A tokenizer in which every byte of a text is a token."""
    vocab = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    words = {f"Ġw{token}": token for token in range(END + 1, parse_stub(model).vocab)}
    made = Tokenizer(models.BPE(vocab={**vocab, "<end>": END, **words}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made
