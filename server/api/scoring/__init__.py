"""Scores of many items: the probabilities of label tokens at the end of each."""
