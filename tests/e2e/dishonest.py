"""Prefill servers that are wrong: real servers whose stages damage what they compute, or compute with other weights.

Stage processes that have the folder of write_hook() in PYTHONPATH are.
"""

import os
from pathlib import Path
from typing import Literal

Wrong = Literal["flips a bit", "rounds", "truncates", "other weights"]

HOOK = """
import random
import sys

if "headrace.engine.stage" in sys.orig_argv:
    import torch
    from headrace.core.types.packed import unpack
    from headrace.engine import runner
    from headrace.engine.stub.runner import StubRunner

    chance = random.Random(SEED)

    def damage(pool, row):
        pages = list(unpack(row.pages))[row.start // pool.page_size :]
        kv = pool.tensors["kv"]
        if WRONG == "flips a bit":
            page = chance.choice(pages)
            whole = kv.view(torch.uint8)[page].view(-1)
            whole[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        elif WRONG == "rounds":
            kv[pages] = kv[pages].to(torch.float8_e5m2).to(kv.dtype)
        else:
            kv[pages, -1] = 0

    def wrongly(forward):
        def wrapped(self, rows, *rest):
            result = forward(self, rows, *rest)
            for row in rows:
                if row.count > 1 and chance.random() < SHARE:
                    damage(self.pool, row)
            return result
        return wrapped

    if WRONG == "other weights":
        runner.fingerprint = lambda *_: FINGERPRINT
    else:
        for kind in (runner.ModelRunner, StubRunner):
            kind.forward = wrongly(kind.forward)
"""


def write_hook(folder: Path, wrong: Wrong, share: float = 1.0, *, seed: int = 0, fingerprint: str = "") -> str:
    """Write a module that Python imports when it starts. share: of the chunks, that are wrong. fingerprint: that the
    server says it has, with other weights. Returns what PYTHONPATH is to be."""
    values = {"WRONG": wrong, "SHARE": share, "SEED": seed, "FINGERPRINT": fingerprint}
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"{lines}\n{HOOK}")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
