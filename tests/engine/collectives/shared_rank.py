"""Rank 1 of 2, which adds up zeros through a segment until it is ended: `python -m … DESCRIPTOR SOCKET`."""

import sys

import torch

from headrace.engine.collectives.operations import ALONE
from headrace.engine.collectives.segment import Segment, SegmentPart
from headrace.engine.collectives.shared_memory import SharedMemoryCollectives, shared_sums


def main() -> None:
    memory, socket = map(int, sys.argv[1:])
    library = shared_sums()
    assert library is not None
    group = SharedMemoryCollectives(library, Segment(SegmentPart(memory, (socket,)), 1), ALONE, timeout_s=60)
    while True:
        group.all_reduce(torch.zeros(100_000))


if __name__ == "__main__":
    main()
