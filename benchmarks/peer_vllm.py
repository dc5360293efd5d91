"""vLLM on the CPU as a child process in an environment of its own (see benchmarks/peers.py, and benchmarks/peer.py).

`python -m benchmarks.peer_vllm MODEL DTYPE THREADS`: a Hugging Face folder. No prefix cache; the first token
is all it samples.
"""

import os
import sys

from benchmarks.peer import serve, take_stdout

EAGER = True  # nothing compiled: on the CPU as fast as its default, and up within seconds


def main(model: str, dtype: str, threads: int) -> None:
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
