"""Models computed by transformers' own modules over the paged pool: whatever has no decoder of our own.

    config.json ── probe on the meta device ──► LibrarySpec: what each layer caches
                                                     │
    rows of a plan ──► Batch ◄── hooks ── modules of transformers ── replaced products ──► Arithmetic
                         │
                       pool

What a model calls its cache is what the pool holds: update() of its cache writes there. Attention, masks and experts
are ours by transformers' interfaces for them, products by replaced modules. In the engine only this package imports
transformers.
"""
