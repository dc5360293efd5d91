"""httpx clients for traffic between our own servers, which follows nothing of the environment but its certificates.

HTTP_PROXY and its kin are for traffic that leaves the cluster: a proxy would get prompts and API keys, and could not
reach the servers besides; httpx reads no networks in NO_PROXY. A ~/.netrc would put a password in the place of no key.
Whom TLS trusts is the environment's to say: the machine's store, and SSL_CERT_FILE and SSL_CERT_DIR as of OpenSSL.
"""

import ssl
from collections.abc import Mapping

import httpx

from headrace.integrations.cancelled_requests import CancellableTransport


def direct_client(
    *,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None,
    verify: bool = True,
) -> httpx.Client:
    """A client that connects to the host of the URL itself. timeout: seconds. verify: False for a server that is known
    otherwise, such as a child of this process."""
    trusted = trusted_certificates() if verify else False
    return httpx.Client(base_url=base_url, headers=headers, timeout=timeout, verify=trusted, trust_env=False)


def direct_async_client(
    *,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float | None,
    limits: httpx.Limits | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """The same for an event loop; requests may be cancelled at any moment. limits: httpx's own where there are none.
    transport: in place of the network."""
    if transport is None:
        limits = limits or httpx.Limits(max_connections=100, max_keepalive_connections=20)
        network = httpx.AsyncHTTPTransport(verify=trusted_certificates(), limits=limits, trust_env=False)
        transport = CancellableTransport(network)
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout, transport=transport, trust_env=False)


def bearer(api_key: str) -> dict[str, str]:
    """The head of a request that shows this key; none for ""."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def trusted_certificates() -> ssl.SSLContext:
    """Authorities of the machine (OpenSSL's paths, SSL_CERT_FILE, SSL_CERT_DIR), and those that httpx brings."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context
