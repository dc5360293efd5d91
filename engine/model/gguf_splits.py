"""How byte-level tokenizers of GGUF files split a text before they merge bytes, by tokenizer.ggml.pre.

transformers takes GPT-2's split for names that it does not know, whose tokens would silently be others.
"""

from typing import Any

from headrace.core.types.errors import ConfigError

# GPT-2's split. Of the second row digits are single, too: their vocabularies have no merges of digits.
GPT2 = (
    "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling",
    "smollm", "starcoder", "refact", "command-r", "codeshell",
)  # fmt: skip
LLAMA3 = ("glm4", "chatglm-bpe")  # and others that transformers knows
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def set_split(backend: Any, model: str, name: str) -> None:
    """Have a backend of the tokenizers library, as transformers made it of a file, split as the file says.

    model, name: tokenizer.ggml.model and tokenizer.ggml.pre. Raises ConfigError for a name that is not here.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if model != "gpt2" or name in GPT2 or name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    splits = {
        **dict.fromkeys(LLAMA3, (GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],)),
        "deepseek-v3": DEEPSEEK3,
    }
    if name not in splits:
        known = sorted({*splits, *GPT2, *GGUF_PRE_TOKENIZER_SPLITS})
        raise ConfigError(f"tokenizer.ggml.pre {name!r:.40} is not supported; supported are {', '.join(known)}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
