"""One pipeline stage: model, KV pool, attention, sampling, and the process that executes the scheduler's plans."""
