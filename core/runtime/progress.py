"""Count of what a thread has done, which another thread reads: a thread that works is told from one that hangs."""


class Progress:
    """Steps of a computation. Counted by one thread, read by any."""

    def __init__(self) -> None:
        self.steps = 0
        """So far."""

    def step(self) -> None:
        """Count a step: a layer, or what comes before or after all layers."""
        self.steps += 1
