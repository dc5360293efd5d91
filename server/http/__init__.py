"""The HTTP floor of servers and gateways: protocol bounds, bodies, streams, errors, middleware."""
