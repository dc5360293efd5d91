"""Figures that the README quotes, one command each: `python -m benchmarks.NAME`."""
