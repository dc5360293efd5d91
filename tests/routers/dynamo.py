"""Dynamo's frontend, and workers of it before the servers, from the environment that `make test-routers` makes."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from headrace.engine.model.source import resolve_source
from headrace.engine.model.stub import CHAT_TEMPLATE, END, is_stub, stub_tokenizer
from headrace.server.launch.free_port import free_port
from tests.deployment.files import ROOT
from tests.e2e.harness import wait_until
from tests.routers.fleet import Behind, Child, Router

PYTHON = Path(os.environ.get("HEADRACE_DYNAMO", ".venv-dynamo")) / "bin" / "python"
NO_GRACE = "0"  # seconds for which a worker that ends takes requests of frontends that do not know yet


class Worker(Child):
    """`headrace dynamo` before one server."""

    def __init__(self, fleet: "Dynamo", role: str, url: str, *flags: str, **variables: str) -> None:
        self.role = role
        command = (PYTHON, "-m", "headrace.cli.commands", "dynamo", role, "--url", url)
        variables = {**fleet.variables, "PYTHONPATH": str(ROOT / "src"), **variables}
        super().__init__(f"{role} worker", *command, "--model-path", fleet.tokenizer, *flags, **variables)


class Dynamo(Router):
    """A frontend, and a worker before each server; none of them is ready yet. flags: of the frontend."""

    def __init__(self, behind: Behind, folder: Path, *flags: str, grace_s: str = NO_GRACE) -> None:
        self.tokenizer = str(write_tokenizer(model_of(behind.decode_urls[0]), folder / "tokenizer"))
        self.variables = {
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOGGING_JSONL": "1",  # without it, or OTEL_EXPORT_ENABLED, Dynamo knows nothing of traces
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": grace_s,
        }
        (folder / "discovery").mkdir()
        port = free_port()
        super().__init__("dynamo", PYTHON, *frontend(port), *flags, port=port, **self.variables)
        self.prefills = [Worker(self, "prefill", url) for url in behind.prefill_urls]
        self.decodes = [Worker(self, "decode", url) for url in behind.decode_urls]

    def another(self) -> Child:
        """Another frontend where this one was, which is gone."""
        return Child("frontend", PYTHON, *frontend(int(self.url.rpartition(":")[2])), **self.variables)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    @property
    def log(self) -> str:
        return "\n".join([super().log, *(f"{worker.name}:\n{worker.log}" for worker in self.workers)])

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for worker in self.workers:
                all_of_them.enter_context(closing(worker))
            super().close()

    def registered(self) -> dict[str, int]:
        """Instances in discovery, by component."""
        found: dict[str, int] = {}
        for path in Path(self.variables["DYN_FILE_KV"]).rglob("*generate*"):
            if path.is_file() and "instances" in str(path):
                component = path.name.replace("%2F", "/").split("/")[1]
                found[component] = found.get(component, 0) + 1
        return found


def frontend(port: int) -> tuple[str, ...]:
    return ("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))


@contextmanager
def dynamo(behind: Behind, *flags: str) -> Iterator[Dynamo]:
    """A frontend with workers that serves. flags: of the frontend."""
    with tempfile.TemporaryDirectory() as folder:
        made = Dynamo(behind, Path(folder), *flags)
        try:
            everyone = {"prefill": len(made.prefills), "backend": len(made.decodes)}
            wait_until(lambda: made.registered() == everyone, 60, f"all workers are registered\n{made.log}")
            made.wait_ready({"model": behind.model, "prompt": "ready", "max_tokens": 1, "temperature": 0})
            yield made
        finally:
            print(made.log)  # shown when the test fails
            made.close()


def model_of(url: str) -> str:
    return str(httpx.get(f"{url}/server_info", timeout=20, trust_env=False).json()["model_path"])


def write_tokenizer(model: str, folder: Path) -> Path:
    """The files that Dynamo's frontend reads of a model: of a stub, or of one in GGUF."""
    folder.mkdir()
    if is_stub(model):
        tokenizer = stub_tokenizer(model)
        tokenizer.save(str(folder / "tokenizer.json"))
        write(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE, "eos_token": "<end>"})
        ids: dict[str, Any] = {"eos_token_id": END, "vocab_size": tokenizer.get_vocab_size()}
    else:
        from transformers import PreTrainedTokenizerFast

        path = Path(resolve_source(model).path)
        made = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
        made.save_pretrained(folder)
        ids = {"eos_token_id": made.eos_token_id, "vocab_size": len(made)}
    write(folder / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **ids})
    write(folder / "generation_config.json", {"eos_token_id": ids["eos_token_id"]})
    return folder


def write(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(content))
