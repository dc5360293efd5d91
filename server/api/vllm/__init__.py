"""Routes of vLLM for servers that split the work on a prompt: rendering, generating, texts of tokens."""
