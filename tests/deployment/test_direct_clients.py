"""Traffic between our own servers follows no proxy of the environment: who makes an HTTP client, and how."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.integrations.http_client import direct_async_client, direct_client
from tests.deployment.files import PACKAGES, ROOT

SHIPPED = (*PACKAGES, "benchmarks", "examples")
VERBS = ("get", "post", "put", "patch", "delete", "head", "options", "request")
MAKERS = {
    "httpx": {"Client", "AsyncClient", "stream", "HTTPTransport", "AsyncHTTPTransport", *VERBS},
    "requests": {"Session", "session", *VERBS},
    "urllib.request": {"urlopen", "urlretrieve", "build_opener", "install_opener", "OpenerDirector"},
    "http.client": {"HTTPConnection", "HTTPSConnection"},
    "aiohttp": {"ClientSession", "request"},
    "urllib3": {"PoolManager", "ProxyManager", "request"},
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": {"OTLPSpanExporter"},
}
ALLOWED = {  # what makes a client, and why it may where it does
    ("integrations/http_client.py", "httpx.Client"): "the place where they are made",
    ("integrations/http_client.py", "httpx.AsyncClient"): "the place where they are made",
    ("integrations/http_client.py", "httpx.AsyncHTTPTransport"): "the place where they are made",
    ("peer/lookup.py", "http.client.HTTPConnection"): "reads no environment; the base has no httpx",
    ("engine/kv/tiers/kv_source.py", "http.client.HTTPConnection"): "reads no environment; it is below integrations",
    ("engine/kv/tiers/kv_source.py", "http.client.HTTPSConnection"): "reads no environment but certificates",
    ("gateway/engine_http.py", "http.client.HTTPConnection"): "reads no environment; no httpx either",
    ("gateway/engine_http.py", "http.client.HTTPSConnection"): "reads no environment but certificates",
    ("benchmarks/startup.py", "http.client.HTTPConnection"): "reads no environment",
    ("examples/minimal_peer.py", "urllib.request.build_opener"): "with no proxies; it needs numpy and pyzmq alone",
    ("examples/stream_document.py", "httpx.Client"): "as a user's program makes one; it needs httpx alone",
    ("server/telemetry/otlp_sink.py", "requests.Session"): "trust_env is off",
    (
        "server/telemetry/otlp_sink.py",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter",
    ): "the collector is ours, too; the exporter gets that session",
}
PROXY = "http://127.0.0.1:9"
AUTHORITY = """
-----BEGIN CERTIFICATE-----
MIIBcTCCARegAwIBAgIUb9I8/OdWqk9ywMME0F3DOjr8yLQwCgYIKoZIzj0EAwIw
DTELMAkGA1UEAwwCY2EwIBcNMjYxMTI1MTg0OTM2WhgPMjEyNjExMDExODQ5MzZa
MA0xCzAJBgNVBAMMAmNhMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEHkBoX3qD
hYxYPQPLnUwPhNvd9m/UJzFvAj6VPlf8vjr0RtcAgSShrmxvEMP4mUz0c+oI1z2K
gP5XDEMArwoJrqNTMFEwHQYDVR0OBBYEFHHsBpkEPdlwuK7id4XscQj2uVjQMB8G
A1UdIwQYMBaAFHHsBpkEPdlwuK7id4XscQj2uVjQMA8GA1UdEwEB/wQFMAMBAf8w
CgYIKoZIzj0EAwIDSAAwRQIgf2Qq5D62bJ+Rxhepx3yaUI+8f1zCxz0moonKg42I
idwCIQDGlmbY6wszm7AoGru0ve6rH2g3T4Y+hDiR5VOdh3TLng==
-----END CERTIFICATE-----
"""


def made(source: str) -> Iterator[str]:
    """What makes HTTP clients, by its full name, whatever it is imported as. Annotations make none."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    annotations: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            annotations |= set(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            annotations |= set(ast.walk(node.returns))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in annotations:
            first, *rest = ast.unparse(node).split(".")
            module, _, name = ".".join([modules.get(first, first), *rest]).rpartition(".")
            if name in MAKERS.get(module, ()):
                yield f"{module}.{name}"


def test_clients_are_made_in_one_place() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in SHIPPED
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in made(path.read_text(encoding="utf-8"))
    }
    assert found - set(ALLOWED) == set(), "use headrace.integrations.http_client, or say why not in ALLOWED"
    assert set(ALLOWED) - found == set(), "allowed, and not there any more"


@pytest.mark.parametrize(
    "source",
    [
        "import httpx\nhttpx.Client()",
        "import httpx as h\nkind = h.AsyncClient",
        "from httpx import get as fetch\nfetch('x')",
        "from urllib import request\nrequest.urlopen('x')",
        "import urllib.request\nurllib.request.urlopen('x')",
        "from urllib.request import urlopen\nurlopen('x')",
    ],
)
def test_a_client_is_found_whatever_its_name(source: str) -> None:
    assert list(made(source))


def test_an_annotation_is_no_client() -> None:
    assert not list(made("import httpx\nasync def f(a: httpx.Client, b: int = 1) -> 'x' | httpx.AsyncClient: ..."))


@pytest.fixture
def hostile_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Proxies for everything, none of whose exceptions httpx understands, and a password for every host."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, PROXY)
        monkeypatch.setenv(name.upper(), PROXY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    (tmp_path / "netrc").write_text("default login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def _routes(client: httpx.Client | httpx.AsyncClient) -> Any:
    """Where a client sends what: one transport for all, or others for some patterns of URLs."""
    return client._mounts


@pytest.mark.usefixtures("hostile_environment")
def test_a_client_goes_to_the_address_itself() -> None:
    with httpx.Client(base_url="http://127.0.0.1") as usual:
        assert _routes(usual), "this version of httpx has another attribute for what its environment says"
    with direct_client(base_url="http://127.0.0.1", timeout=1) as client:
        assert not _routes(client)
        assert not client.trust_env
    asynchronous = direct_async_client(timeout=1)
    assert not _routes(asynchronous)
    assert not asynchronous.trust_env


def test_the_environment_names_authorities_of_its_own(tmp_path: Path) -> None:
    """A cluster's own authority is trusted, for https:// of --prefill, by SSL_CERT_FILE."""
    code = """if True:
        from headrace.integrations.http_client import trusted_certificates
        print(trusted_certificates().cert_store_stats()["x509_ca"])
    """
    command = [sys.executable, "-c", code]
    counts = []
    for name, content in (("none.pem", ""), ("authority.pem", AUTHORITY)):
        (tmp_path / name).write_text(content)
        environ = {**os.environ, "SSL_CERT_FILE": str(tmp_path / name), "SSL_CERT_DIR": str(tmp_path / "no-folder")}
        counts.append(int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout))
    assert counts[1] == counts[0] + 1


def health_checks() -> dict[str, list[str]]:
    """Commands, by where they stand."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    found = {name: service["healthcheck"]["test"][1:] for name, service in compose["services"].items()}
    (line,) = re.findall(r"^HEALTHCHECK (?:.*\\\n)*.*CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return {"Dockerfile": json.loads(line), **found}


@pytest.mark.usefixtures("hostile_environment")
@pytest.mark.parametrize("where", health_checks())
def test_a_health_check_asks_its_own_container(where: str) -> None:
    """Docker puts the proxies of its client's configuration into every container."""
    program, *arguments = health_checks()[where]
    if program == "wget":
        assert arguments[:2] == ["-Y", "off"], "busybox' wget follows http_proxy"
        return
    assert program.startswith("python")
    with answering(200) as port:
        assert _status(arguments, port) == 0
    with answering(503) as port:
        assert _status(arguments, port) != 0
    assert _status(arguments, port) != 0  # nothing listens any more


def _status(arguments: Sequence[str], port: int) -> int:
    there = [argument.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for argument in arguments]
    return subprocess.run([sys.executable, *there], capture_output=True, timeout=30).returncode


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers everything with this status. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
