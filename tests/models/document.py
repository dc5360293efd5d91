"""docs/models.md, made from the zoo: python -m tests.models.document writes it."""

from pathlib import Path

from transformers import AutoConfig

from headrace.engine.library.model import model_class
from headrace.engine.model.families import BY_ARCHITECTURE, FAMILIES
from headrace.engine.model.gguf_config import ARCHITECTURES as GGUF
from tests.models.architectures import ARCHITECTURES, SIZES, Architecture
from tests.models.gguf_forms import FORMS

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEFORE = """# Models

This page is made from the code (`python -m tests.models.document`).

## Two decoders

| `--decoder` | what computes a stage's layers |
|---|---|
| `native` | our own layers and kernels, for the architectures marked so below |
| `library` | the modules of transformers 5.23 over the same paged pool |
| `auto` (the default) | native where it is, library elsewhere; the start says which |

Scheduler, cache, tiers and handoff do not know which one it is. What both have: `--pp`, `--tp`, chunks, ragged batches,
the prefix cache, LoRA adapters, `--quantize int8` on CPUs, every form of checkpoint below. Native only:
`--expert-parallel`, latents attended to as they are (DeepSeek).

The library's decoder has no table of architectures. A pass of the model on torch's meta device shows what each layer
caches before a weight is read (`engine/library/probe.py`; the result is kept in `--cache-dir`). The model's cache
writes to the pool; attention, masks and experts are ours through transformers' interfaces for them; `nn.Linear`,
experts, the products of routers, and the RMSNorms and SwiGLU MLPs that give for random rows what ours give, are
computed by our kernels. Code of a repository is never run (`trust_remote_code`), and a weight that is missing or left
over is an error.

**A trial at every start** computes random tokens whole, in chunks and beside another request, and says in the log
whether these gave the same bits or differed by rounding; a model for which they differ by more is refused. Rotations
that depend on the longest position of a batch (longrope, dynamic) are always those of the longest sequence, so
`--max-model-len` is part of the model there: prefill and decode servers need the same.

Both decoders of one architecture cache the same keys and values up to rounding, but their fingerprints differ: prefill
and decode servers have to use the same one.

**States.** What a layer keeps of a request whatever its length (recurrences, convolutions, linear attention) is in a
slot of the pool, in float32: one slot for every 1,024 positions of the pool, 8 at least, so many requests are under way
at once; `headrace check` says how many and how large. The last chunk of a handoff carries it. Such modules run request
by request. Recurrences are summed from the beginning of a chunk, so these models give the same up to rounding, not the
same bits. Index keys (GLM-5, DeepSeek-V3.2) are kept for each token, and positions are selected as transformers does.
Jamba's scan cannot begin with a state, which the trial finds: it gets the tokens behind a first chunk one by one.

The prefix cache keeps **checkpoints** of states: chunks of such models end at the end of a page, 256 tokens or more
behind the one before, and a prompt goes on from the last checkpoint on its path. They take half of the slots at most,
and give way to requests, the least recently used first. The host and disk tiers hold no states, so they are not used.

**Time.** Random models of eight families, library beside native, CPU time of forward passes in float32 on one thread of
an AVX-512 CPU, medians of three rounds in turns (`python -m benchmarks.decoders --threads 1 --rounds 3`): 1.04 to 1.12
times at 128 tokens, 1.02 to 1.07 at 512, 1.01 to 1.08 at 2,048; DeepSeek at 2,048 1.06 and 1.08, and 1.3 on a CPU with
AVX2 only, since the library expands latents of all positions in every layer. A start takes some seconds more:
transformers is imported.

## Architectures

Each is a small random model of the zoo (`make test-models`): logprobs after a prompt in chunks beside another request
and after single tokens, as transformers computes them; the same in two stages and in two shards; and texts behind a
handoff from two stages.

"""
AFTER = """
**Shards.** With `--tp N` a shard has what the model's own plan for tensor parallelism gives it (`base_model_tp_plan` of
transformers; our own for gpt-oss and Qwen3-VL, which have none): heads, an MLP's inner columns, whole experts. What a
plan gathers again is whole on every shard, and so are embeddings, heads, routers, norms, encoders of images, and
modules with states. N has to divide heads, KV heads and inner widths; `headrace check` says what it may be. States and
latents are on all shards, and the first one hands them over.

**Images.** Qwen3-VL, Qwen2.5-VL and Mistral 3 take images ([how](operations.md#images)): encoded in the first stage by
the model's own encoder, with its positions (mrope) and deepstack embeddings, in chunks, beside other requests and
behind a handoff, as transformers computes them. Qwen3-VL's go into hidden states behind the first layers, which the
first stage needs to have. Other wrappers of several inputs are served for text: in Gemma 3 the tokens of an image see
each other both ways, so that no chunk may cut it. No stage but the first loads an encoder, and none one that is not
used.

**Windows.** Keys and values of layers that attend to the last tokens only (Gemma, gpt-oss, Cohere 2, OLMo 3 …) are
kept in pages as all others (`--windows keep`), or, with `--windows free` and the library's decoder, in a ring in the
request's slot, beside its states if it has any: positions behind the window are overwritten, and a handoff carries the
last ones only. The pass on the meta device finds these layers: those whose mask is a window far from the beginning and
whose keys no other layer attends to, where the longest sequence is more than twice the window. Results are the same,
and so are bits where they are without it. What a request hands over (`python -m benchmarks.windows`), in bfloat16:

| MiB, kept and freed | 2,048 tokens | 8,192 | 32,768 | 131,072 |
|---|---|---|---|---|
| Gemma 3 27B | 992, 576 (1.7) | 3,968, 1,056 (3.8) | 15,872, 2,976 (5.3) | 63,488, 10,656 (6.0) |
| gpt-oss-120b | 144, 76 (1.9) | 576, 292 (2.0) | 2,304, 1,156 (2.0) | 9,216, 4,612 (2.0) |

The price is that of states: prefixes are cached at checkpoints only, each takes a slot (a pool has one for every 1,024
positions, or for every four rings' if that is more), and there are no tiers. Short prompts with a common beginning want
`keep`, long ones `free`. Prefill and decode servers need the same.

A native window (Mistral 7B v0.1) limits a request to it; `--decoder library` computes beyond.

## Checkpoints

From safetensors, for both decoders. Forms are recognised by what lies beside a weight in its file, whatever the
configuration says, and expanded to the model's dtype while they are loaded, four tensors at a time; with
`--quantize int8` into 8 bits directly. A weight without its scale is refused by name.

| form | tensors |
|---|---|
| float8 in blocks (DeepSeek-V3, Kimi K2, Qwen3) | `weight` + `weight_scale_inv` |
| float8 per tensor or channel (compressed-tensors, modelopt) | `weight` + `weight_scale` |
| int8 per channel (compressed-tensors, bitsandbytes) | `weight` + `weight_scale` or `SCB` |
| compressed-tensors, 4 and 8 bits | `weight_packed` + `weight_scale`, zero points, activation order |
| AWQ (gemm), 4 bits | `qweight` + `qzeros` + `scales` |
| GPTQ and GPTQ v2, 2, 4 and 8 bits | the same, with or without activation order (`g_idx`) |
| MXFP4 (gpt-oss) | `NAME_blocks` + `NAME_scales` |
| NVFP4 (compressed-tensors, modelopt) | `weight_packed` or `weight` + `weight_scale` + a scale of scales |
| nf4, fp4 (bitsandbytes), nested scales too | `weight` + `weight.absmax` + `weight.quant_map` + `weight.quant_state…` |

Products are those of expanded weights with activations as they are: scales of activations and of KV are not used. On
GPUs that multiply FP8, linear layers in float8 of our own decoder's models stay so ([GPUs](gpu.md)).
Refused: other methods (`hqq`, `aqlm`, `torchao` …), sparse layouts, transforms, GPTQ in 3 bits, AWQ's gemv.

## GGUF

`--model` names a file, any part of a split one (`NAME-00001-of-00003.gguf`), or the folder of either. Every kind of
tensors that the gguf package expands is read: Q4_0 to Q8_0, K quants, IQ1 to IQ4, TQ, MXFP4, NVFP4, BF16, F16, F32;
others are refused by name.

| `general.architecture` | models: decoders |
|---|---|
"""
GGUF_AFTER = """
For the library's decoder a configuration is made of the metadata, tensors are named by gguf's own map, and what
llama.cpp's converter did to weights is undone: rows in pairs, norms stored as 1 + w, experts in one tensor each for
gates and values, `kv_b` in two. A key of the architecture or a tensor that nobody reads is refused by its name. What a
file does not say is as llama.cpp has it: windows of Gemma 3 on five layers of six, the scale of its largest model,
groups of experts that older files of DeepSeek lack (computed without groups).
`make test-models` computes models of the zoo out of GGUF files, and Gemma 3 270M (Q4_K_M) as it is published, beside
transformers.
"""


def written() -> str:
    """The document."""
    rows = ["| architecture | decoder | stages | shards |", "|---|---|---|---|"]
    for name, each in ARCHITECTURES.items():
        architecture = model_class(AutoConfig.for_model(each.model_type, **{**SIZES, **each.fields})).__name__
        decoder = f"not served: {each.refused}" if each.refused else "library"
        if architecture in BY_ARCHITECTURE and not each.refused:
            decoder = "native, library"
        parts = f"{stages(each.refused, many=each.stages)} | {shards(each)}"
        rows.append(f"| `{architecture}` ({name}) | {decoder} | {parts} |")
    return BEFORE + "\n".join(rows) + "\n" + AFTER + "\n".join(gguf_rows()) + "\n" + GGUF_AFTER


def gguf_rows() -> list[str]:
    """Architectures of GGUF files, and the models of the zoo that are tried with them."""
    native = {family.model_type for family in FAMILIES if family.gguf}
    rows = []
    for architecture in GGUF:
        tried = [name for name, form in FORMS.items() if form.architecture == architecture]
        own = [f"{architecture}: native, library"] if architecture in native else []
        rows.append(f"| `{architecture}` | {'; '.join([*own, *(f'{name}: library' for name in tried)])} |")
    return rows


def stages(refused: str, *, many: bool) -> str:
    """How many pipeline stages."""
    if refused:
        return ""
    return "any" if many else "1"


def shards(architecture: Architecture) -> str:
    """How many shards of a stage."""
    if architecture.refused:
        return ""
    return "1" if architecture.undivided else "any"


if __name__ == "__main__":
    DOCUMENT.write_text(written())
