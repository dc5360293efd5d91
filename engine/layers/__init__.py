"""Layers of a decoder: attention and MLP blocks, each with its weights and its forward pass."""
