"""Sampling of tokens, and log-probabilities."""
