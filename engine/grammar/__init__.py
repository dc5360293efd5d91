"""Constrained decoding: constraints compiled by llguidance, and the tokens that they allow. No torch."""
