"""Routes and statuses that are counted from the start."""

PROMPT_ROUTES = ("/v1/prefill", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate")
"""Those whose requests have prompts, and are counted in requests_total. None has parameters in its path."""

UNKNOWN_ROUTE = "other"
"""The label of all paths that are no route, which clients make up."""

STATUSES = (200, 400, 401, 404, 408, 409, 413, 429, 499, 500, 502, 503, 504)
"""Statuses that they answer with."""
