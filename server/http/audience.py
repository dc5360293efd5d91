"""Whom a route is for. Every route says it with its description; ApiKeys checks it before the route is called."""

from collections.abc import Sequence
from typing import Literal

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

Audience = Literal["everyone", "clients", "operators"]
"""everyone: no key is asked for, ever. clients: any key, also one of --tenant-key; what the answer tells, and what it
ends, is the tenant's own, or no one's. operators: a key of --api-key; the answer is about requests of all tenants, or
about where they can be read."""


class Audiences:
    """Who may call which route of an application."""

    def __init__(self, routes: Sequence[tuple[BaseRoute, Audience]]) -> None:
        """routes: as the application matches them, first to last."""
        self._routes = list(routes)

    def of(self, scope: Scope) -> Audience:
        """Whom the route of a request is for. Matched as the router does it, whatever way a path is written in; a path
        that no route has is for clients, who get 404."""
        for route, audience in self._routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                return audience
        return "clients"
