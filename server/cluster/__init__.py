"""Ranks on a cluster that others manage: `headrace up` places them, watches them and replaces them."""
