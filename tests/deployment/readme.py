"""The commands of README.md, and the test that runs each of them."""

import re
import shlex

from tests.deployment.files import ROOT

README = ROOT / "README.md"
PROGRAMS = ("headrace", "make", "pip", "docker", "curl", "prometheus", "vllm-router", "sglang-router")
PREFILL = "headrace serve --role prefill --port 8000 --model smollm2"
DECODE = "headrace serve --role decode --port 8001 --model smollm2 --prefill http://127.0.0.1:8000"
SKY = "Why is the sky blue?"
CURL = (
    "curl localhost:8001/v1/chat/completions -H 'content-type: application/json' -d "
    f"""'{{"messages": [{{"role": "user", "content": "{SKY}"}}], "max_tokens": 100, "stream": true}}'"""
)
PAIR = "tests/e2e/test_readme.py::test_a_pair_as_the_readme_starts_it"
ROUTERS = "tests/routers/test_readme.py::test_a_router_as_the_readme_starts_it"
WHEEL = "tests/deployment/test_wheel.py::test_a_pair_runs_among_modules_of_other_projects"
BASE = "tests/deployment/test_wheel.py::test_the_base_is_a_peer_without_torch_and_fastapi"
TARGET = "tests/deployment/test_readme.py::test_targets_of_make"
PROMETHEUS = "prometheus --config.file=configs/prometheus-local.yml --storage.tsdb.path=/tmp/headrace-prometheus"
URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
RUN_BY = {
    "headrace bake": "tests/e2e/test_kv_library.py::test_a_baked_prefix_gives_the_same_text",
    PREFILL: PAIR,
    DECODE: PAIR,
    CURL: PAIR,
    "make demo": "tests/e2e/test_demo.py::test_texts_are_compared_in_the_dtype_that_it_names",
    "make test": TARGET,
    "make test-routers": TARGET,
    "make test-evaluation": TARGET,
    "make test-sglang": TARGET,
    "make test-vllm": TARGET,
    "make bench": TARGET,
    "make bench-peers": TARGET,
    "pip install 'headrace[server]'": WHEEL,
    "pip install '.[server]'": WHEEL,
    "pip install 'headrace[vllm]'": BASE,
    "pip install 'headrace[transformers]'": WHEEL,
    "pip install headrace": BASE,
    "headrace dynamo": "tests/routers/test_dynamo.py::test_the_commands_of_the_page",
    "headrace check": "tests/cli/test_commands.py::test_check_prints_a_loadable_configuration_and_the_memory",
    "headrace gateway": "tests/gateway/vllm_nixl/test_texts.py::test_completions_of_token_ids",
    "headrace simulate TRACE": "tests/tools/simulate/test_command.py",
    "headrace bench serve URL": "tests/tools/bench",
    "docker compose up": "tests/deployment/test_containers.py::test_a_pair_runs_is_watched_and_drains",
    PROMETHEUS: "tests/prometheus/test_readme.py::test_the_pair_of_the_readme_is_scraped",
    f"vllm-router --vllm-pd-disaggregation --prefill {URLS[0]} --decode {URLS[1]}": ROUTERS,
    f"sglang-router launch --pd-disaggregation --prefill {URLS[0]} 8998 --decode {URLS[1]}": ROUTERS,
}
"""By command, without spaces that mean nothing."""


def commands() -> list[str]:
    """Every command in a block, in the text, or in a comment of Python, as a shell would split it."""
    text = README.read_text(encoding="utf-8")
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line.split("  # ")[-1] if language == "python" else line for line in lines]
        found += re.findall(r"# in a checkout: (.*)", block)
    found += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    split = [shlex.split(line, comments=True) for line in found if line.startswith(PROGRAMS)]
    return [shlex.join(words) for words in split if words[0] in PROGRAMS and len(words) > 1]


def with_ports(command: str, ports: dict[str, int]) -> list[str]:
    """The words of a command, with other ports in the place of those that it names."""
    for port, other in ports.items():
        command = re.sub(rf"\b{port}\b", str(other), command)
    return shlex.split(command)
