"""The memory of the CPU in the place of a GPU's, with events that say so."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from headrace.engine.kv import pinned_blocks


@dataclass
class Device:
    """Copies are made at once, and are done when `finished` says so."""

    finished: bool = True
    waits: int = 0
    """Of the host, for events."""
    events: int = 0
    """That were recorded."""

    @classmethod
    def patched(cls, monkeypatch: pytest.MonkeyPatch) -> "Device":
        """In the place of torch.cuda's streams and events, until monkeypatch is undone."""
        made = cls()
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(made))
        monkeypatch.setattr(pinned_blocks, "_pinned", lambda blocks, size: torch.empty(blocks, size, dtype=torch.uint8))
        return made


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ended = False

    def record(self, _: object) -> None:
        """It is done when the device says so."""
        self._device.events += 1

    def query(self) -> bool:
        self._ended = self._ended or self._device.finished
        return self._ended

    def synchronize(self) -> None:
        self._device.waits += 1
        self._ended = True
