"""Policies: the order of what is to be computed."""
