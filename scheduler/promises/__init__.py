"""Promised times to first token: what was seen lately, the bounds that follow, and whether they were kept."""
