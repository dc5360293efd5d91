"""vLLM on the CPU for benchmarks.peers, as a child process in its own environment (protocol: benchmarks/peer.py).

`python -m benchmarks.peer_vllm FOLDER DTYPE THREADS`. There is no prefix cache, and one token is sampled per prompt.
"""

import os
import sys

from benchmarks.peer import serve, take_stdout

EAGER = True  # not compiled: on the CPU as fast as the default, and started within seconds


def main(model: str, dtype: str, threads: int) -> None:
    """Serve prompts. model: a Hugging Face folder."""
    answers = take_stdout()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=EAGER,
        max_model_len=8192,
    )
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def compute(prompts: list[list[int]]) -> None:
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], one, use_tqdm=False)

    serve(compute, answers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
