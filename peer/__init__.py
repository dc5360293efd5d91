"""A decode side as a library: where KV comes from, for engines and gateways of any make."""
