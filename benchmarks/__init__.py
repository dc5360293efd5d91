"""Benchmarks: one command per figure that the README quotes; `python -m benchmarks.NAME --help` says what it prints."""
