"""Stock vLLMs, prefill servers and a gateway between them, and the ways that requests take to them."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.vllm_server import NAME, PYTHON, Ports, Vllm, takes_by_nixl
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.integrations.vllm.sides import BESIDE_OTHERS

PREFILL = ("--role", "prefill", "--model", "smollm2", "--max-model-len", "4096", "--threads", "1")
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def stock(
    folder: Path,
    dtype: str = "float32",
    *flags: str,
    versioned: bool = False,
    ports: Ports | None = None,
    python: Path = PYTHON,
) -> Vllm:
    """A vLLM as it comes from its package. versioned: but for the version of its NixlConnector. python: of its
    environment."""
    transfer, modules = takes_by_nixl(), []
    if versioned:
        transfer["kv_connector_module_path"] = "versioned"
        modules.append(Path(__file__).parent / "in_vllm")
    flags = ("--max-num-seqs", "4", *flags)
    return Vllm(folder, transfer, *flags, dtype=dtype, modules=modules, ports=ports, python=python, **BESIDE_OTHERS)


def gateway_flags(decodes: Sequence[Vllm], prefills: Sequence[Server]) -> tuple[str, ...]:
    """Flags of headrace gateway that name the servers on both sides."""
    flags: list[str] = []
    for decode in decodes:
        flags += ["--decode", f"{decode.url}=127.0.0.1:{decode.ports.side_channel}"]
    for prefill in prefills:
        flags += ["--prefill", prefill.url]
    return tuple(flags)


class Site(NamedTuple):
    """What a request goes through, but for the router, which takes the gateway for the prefill side."""

    prefills: tuple[Server, ...]
    gateway: Server
    decodes: tuple[Vllm, ...]
    bootstrap_port: int = 0
    model: str = NAME

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        return (self.gateway.url,)

    @property
    def decode_urls(self) -> tuple[str, ...]:
        return tuple(decode.url for decode in self.decodes)

    @property
    def decode(self) -> Vllm:
        return self.decodes[0]

    def quiet(self) -> None:
        """Wait until nobody holds pages or blocks."""
        for server in (*self.prefills, self.gateway):
            if server.process.poll() is None:
                wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")
        for decode in self.decodes:
            if decode.process.poll() is None:
                wait_until(decode.idle, 20, f"vLLM has nothing open\n{decode.log[-4000:]}")

    def recomputed(self, reason: str) -> float:
        """Requests that were left to the decode engine for this reason."""
        return self.gateway.metrics()[f'headrace_gateway_recomputed_total{{reason="{reason}"}}']


@contextmanager
def gateway_of(decodes: Sequence[Vllm], prefills: Sequence[Server], *flags: str) -> Iterator[Site]:
    """A gateway that is ready, between these servers."""
    server = Server(*gateway_flags(decodes, prefills), *flags, command="gateway")
    with running(server):
        yield Site(tuple(prefills), server, tuple(decodes))


def refused(*flags: str) -> str:
    """What a gateway says that ends with status 2."""
    with closing(Server(*flags, command="gateway")) as gateway:
        assert gateway.ended() == 2, gateway.log
        assert "Traceback" not in gateway.log
        return gateway.log


class Example:
    """The two requests that vLLM's proxy example makes of one: first to the prefill side, then to the decode side.

    It is toy_proxy_server.py in vLLM's tests of NixlConnector; disagg_proxy_demo.py makes the same two, and puts the
    host by which it knows the prefill side into remote_host.
    """

    def __init__(self, site: Site, decode: Vllm | None = None) -> None:
        self.site = site
        self.decode = decode or site.decode

    def first(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer of the prefill side."""
        body = {**body, "kv_transfer_params": ASKED, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        for key in ("stream_options", "min_tokens", "min_completion_tokens"):
            body.pop(key, None)
        return self._post(self.site.gateway.url, path, body)

    def params(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """kv_transfer_params of the prefill side's answer; {} if it has none."""
        answer = self.first(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json().get("kv_transfer_params") or {}
        return found

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Both requests; the answer of the decode side, or an error of the prefill side."""
        answer = self.first(path, body)
        if answer.status_code != 200:
            return answer
        return self.second(path, body, answer.json().get("kv_transfer_params") or {})

    def second(self, path: str, body: dict[str, Any], params: dict[str, Any]) -> httpx.Response:
        """The answer of the decode side."""
        return self._post(self.decode.url, path, {**body, **({"kv_transfer_params": params} if params else {})})

    @staticmethod
    def _post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": "Bearer None", "X-Request-Id": secrets.token_hex(8)}  # as without OPENAI_API_KEY
        return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=120, trust_env=False)
