"""One command per figure that the README quotes; `python -m benchmarks` runs them all."""
