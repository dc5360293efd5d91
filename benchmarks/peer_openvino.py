"""OpenVINO GenAI for benchmarks.peers, as a child process in its own environment (protocol: benchmarks/peer.py).

`python -m benchmarks.peer_openvino GGUF DTYPE THREADS QUANTIZE`. QUANTIZE: none leaves activations as they are; int8 is
OpenVINO's default, which quantises them in groups. There is no prefix cache, and one token is sampled per prompt.
"""

import sys

from benchmarks.peer import serve, take_stdout

PRECISION = {"float32": "f32", "bfloat16": "bf16"}


def main(model: str, dtype: str, threads: int, quantize: str) -> None:
    """Serve prompts. model: a .gguf file."""
    answers = take_stdout()
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 4  # GiB
    scheduler.max_num_batched_tokens = 2048
    properties = {
        "INFERENCE_PRECISION_HINT": PRECISION[dtype],
        "INFERENCE_NUM_THREADS": threads,
    }
    if quantize == "none":
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    engine = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    one = genai.GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)

    def compute(prompts: list[list[int]]) -> None:
        engine.generate([ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts], [one] * len(prompts))

    serve(compute, answers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
