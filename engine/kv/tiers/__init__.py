"""Host and disk tiers of a stage: copies of KV pages outside the pool, and the thread that makes and loads them."""
