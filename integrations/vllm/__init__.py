"""KV connector for vLLM: a stock vLLM takes its prompts' KV from prefill servers (pip install headrace[vllm])."""
