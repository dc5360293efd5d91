"""Configuration of the model and of the engine that runs it."""

from typing import Annotated, Literal

import msgspec

from headrace.core.config.flag import KV_CACHE, MODEL, STAGES, Flag
from headrace.core.types.requests.images import ImageTerms

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["none", "int8"]
Compile = Literal["auto", "on", "products", "off"]
AttentionChoice = Literal["auto", "flashinfer", "triton", "torch"]
CudaGraphs = Literal["auto", "off"]
DecoderChoice = Literal["auto", "native", "library"]
MlaForm = Literal["auto", "absorbed", "expanded", "length"]
Windows = Literal["keep", "free"]
ExpertExchange = Literal["auto", "allgather", "alltoall"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is served, and in what form."""

    model: Annotated[str, Flag("model", MODEL, "smollm2, a Hugging Face folder, a .gguf file or a hub id")] = "smollm2"
    dtype: Annotated[Dtype, Flag("dtype", MODEL, "data type of weights and KV cache")] = "auto"
    """Resolved, never "auto", when a stage gets it."""
    quantize: Annotated[
        Quantize,
        Flag(
            "quantize",
            MODEL,
            "int8: linear layers in 8 bits, weights and activations, on the CPU; Q8_0 weights of a .gguf file are used "
            "as they are; the KV cache stays in --dtype",
        ),
    ] = "none"
    decoder: Annotated[
        DecoderChoice,
        Flag(
            "decoder",
            MODEL,
            "native: our own layers; library: transformers' modules over the same pool; auto: native for the models "
            "that it has, library for all others",
        ),
    ] = "auto"
    """Resolved, never "auto", when a stage gets it."""
    lora: Annotated[
        tuple[str, ...],
        Flag(
            "lora",
            MODEL,
            "NAME=FOLDER of a LoRA adapter in peft's format, which requests choose by model NAME; repeatable",
        ),
    ] = ()
    device: Annotated[str, Flag("device", MODEL, "auto, cpu or cuda[:index]")] = "auto"
    """Resolved, never "auto", when a stage gets it."""
    max_model_len: Annotated[
        int,
        Flag(
            "max-model-len", MODEL, "prompt and generated tokens of one request together; 0: the model's limit", low=0
        ),
    ] = 0
    hidden_size: int = 0
    """Elements of one hidden state of the model."""
    images: ImageTerms | None = None
    """How it takes images; None where it does not."""
    no_images: str = ""
    """Why it takes none."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage computes, and the size of its KV pool."""

    page_size: Annotated[int, Flag("page-size", KV_CACHE, "tokens per KV page, a power of two", low=1, high=4096)] = 16
    kv_pages: Annotated[int, Flag("kv-pages", KV_CACHE, "pages in the KV pool; 0: as many as memory allows", low=0)] = 0
    kv_memory: Annotated[
        float,
        Flag(
            "kv-memory",
            KV_CACHE,
            "share of the memory beside weights and activations that the KV pool takes where --kv-pages is 0; 0: 0.9 "
            "on GPUs, and on CPUs what 65,536 tokens take or 0.4 of all memory, whichever is less",
            low=0,
            high=1,
            unit="share",
        ),
    ] = 0.0
    host_pages: Annotated[
        int, Flag("host-pages", KV_CACHE, "KV pages kept in host memory beside the pool; 0: no host tier", low=0)
    ] = 0
    disk_path: Annotated[
        str, Flag("disk-path", KV_CACHE, "folder for KV pages on disk, found again after a restart (default: none)")
    ] = ""
    disk_gib: Annotated[
        int, Flag("disk-gib", KV_CACHE, "GiB that KV pages on disk may take, all stages together", low=0)
    ] = 16
    kv_library: Annotated[
        tuple[str, ...],
        Flag(
            "kv-library",
            KV_CACHE,
            "folder or http(s):// address with KV files of headrace bake, which prompts that begin like them use; "
            "repeatable",
        ),
    ] = ()
    kv_library_any_cpu: Annotated[
        bool,
        Flag(
            "kv-library-any-cpu",
            KV_CACHE,
            "also take KV files that were computed by another kind of CPU, another GPU, or other versions: answers "
            "may differ from those without the file",
        ),
    ] = False
    kv_library_seconds: Annotated[
        float, Flag("kv-library-seconds", KV_CACHE, "seconds between two looks for KV files", low=1)
    ] = 60.0
    windows: Annotated[
        Windows,
        Flag(
            "windows",
            KV_CACHE,
            "keys and values of layers that attend to the last tokens only (Gemma, gpt-oss), with --decoder library: "
            "keep all in pages; free: keep and hand over the last ones, without tiers, and with prefixes cached at "
            "checkpoints only; the same on both sides of a handoff",
        ),
    ] = "keep"
    threads: Annotated[
        int,
        Flag("threads", MODEL, "CPU threads of one rank; 0: all cores, or a CPU quota, divided by the ranks", low=0),
    ] = 0
    pp_layers: Annotated[
        tuple[int, ...],
        Flag("pp-layers", STAGES, "layers of each stage, such as 8,8,7,7 (default: so that stages take equal time)"),
    ] = ()
    """Resolved, never empty, when a stage gets it."""
    compile: Annotated[
        Compile,
        Flag(
            "compile",
            MODEL,
            "fused kernels for GPUs, compiled by Triton at the start; auto: on a GPU where Triton is installed; "
            "products: as on, with kernels for dense matrix products, too, which torch else computes",
        ),
    ] = "auto"
    attention: Annotated[
        AttentionChoice,
        Flag(
            "attention",
            MODEL,
            "attention of our own layers on GPUs: by FlashInfer or our Triton kernel, which read KV pages where they "
            "are, or torch's; auto: flashinfer where headrace[flashinfer] is installed and works, else torch",
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        CudaGraphs,
        Flag(
            "cuda-graphs",
            MODEL,
            "launch what a GPU computes between attention and attention as one, in passes of up to 1,024 tokens; auto: "
            "with models whose layers allow it",
        ),
    ] = "auto"
    mla: Annotated[
        MlaForm,
        Flag(
            "mla",
            MODEL,
            "attention of DeepSeek models to latents: absorbed, expanded, or length: whichever is cheaper for a chunk; "
            "auto: absorbed on the CPU, where results then do not depend on chunks, length on GPUs",
        ),
    ] = "auto"
    expert_parallel: Annotated[
        bool,
        Flag(
            "expert-parallel",
            STAGES,
            "divide the experts of MoE layers among all ranks of a stage, of all data-parallel replicas",
        ),
    ] = False
    exchange: Annotated[
        ExpertExchange,
        Flag(
            "exchange",
            STAGES,
            "how tokens reach the experts of other ranks, with --expert-parallel: allgather brings all tokens to all "
            "ranks, alltoall each one to the ranks of its experts; auto: allgather on GPUs and with few ranks",
        ),
    ] = "auto"
    overlap: Annotated[
        bool,
        Flag(
            "overlap",
            STAGES,
            "dual-batch overlap: compute large passes of --dp replicas with --expert-parallel in two halves, so that "
            "tokens of one travel to experts while the other computes",
        ),
    ] = False
    pass_tokens: int = 0
    """Copy of SchedulerConfig.chunk_tokens: token budget of one forward pass of a replica."""
    cache_dir: str = ""
    """Copy of ServerConfig.cache_dir, where tokenizers are kept for constraints."""
    cpuinfo: str = "/proc/cpuinfo"
    """File with the flags of this machine's CPU, in the format of /proc/cpuinfo; set by HEADRACE_CPUINFO."""
