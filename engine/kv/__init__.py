"""The paged KV pool of a stage: its size, its memory, and copies to and from GPUs."""
