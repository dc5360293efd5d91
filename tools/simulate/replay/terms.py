"""What other servers of a replay are told of the terms of a request."""

from headrace.core.types.requests.terms import RequestTerms


def whose(terms: RequestTerms) -> RequestTerms:
    """Those of KV that moves: whose it is, and nothing else of the request that it is moved for."""
    return RequestTerms(tenant=terms.tenant, cache_salt=terms.cache_salt)


def at_prefill(terms: RequestTerms) -> RequestTerms:
    """Those of a prompt that a decode server sends to a prefill server, whose client it is, of no name here."""
    return RequestTerms(cache_salt=terms.cache_salt, retain=terms.retain, session=terms.session)
