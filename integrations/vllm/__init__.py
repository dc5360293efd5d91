"""A KV connector for vLLM that takes prompts' KV from Headrace. Installed into vLLM's environment as headrace_vllm."""
