"""Text into token ids and back: tokenizers, chat templates, detokenizing, logprob texts, tool calls."""
