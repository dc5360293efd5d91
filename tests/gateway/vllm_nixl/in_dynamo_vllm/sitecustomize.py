"""Imported by each Python process of a stock dynamo.vllm on a CPU.

torchvision, which is imported there, is made for CUDA: its library does not load beside PyTorch's build for CPUs, and
its Python part expects that two operators are known.
"""

import torch

# The library object has to be kept, or they are forgotten.
OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
