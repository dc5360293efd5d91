"""The model: specification, sources (Hugging Face folder, GGUF, stub), checkpoints, weights and layer arithmetic."""
