"""Tokenization, chat templates, incremental detokenization and logprobs."""
