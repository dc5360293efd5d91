"""Adapter for transformers: generate() continues from KV that a Headrace prefill server computed.

from headrace.integrations.transformers import RemotePrefill

with RemotePrefill("http://127.0.0.1:8000", model) as remote:
    cache = remote.prefill(input_ids)
text = model.generate(input_ids, past_key_values=cache, max_new_tokens=50)
"""

from headrace.integrations.transformers.remote import RemotePrefill

__all__ = ["RemotePrefill"]
