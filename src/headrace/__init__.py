"""Headrace: a disaggregated prefill server for large language models, and the library that its peers use."""
