"""The model of one stage: its specification, where it comes from, its weights, and the decoder that runs them."""
