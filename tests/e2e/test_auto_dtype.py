"""--dtype auto on two kinds of CPU: another dtype on each, and a pair over both of them is refused."""

from contextlib import closing

import pytest

from headrace.server.config.load import CPUINFO_VARIABLE
from tests.cpus import KINDS, cpuinfo
from tests.e2e.harness import Server, running, serving, wait_until

SMOLLM2 = ("--dtype", "auto", "--threads", "1", "--kv-pages", "32", "--max-model-len", "512")
STUB = ("--model", "stub:layers=4,hidden=32", "--dtype", "auto", "--max-model-len", "512")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_says_which_dtype_it_is_and_answers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(CPUINFO_VARIABLE, cpuinfo(kind))
    with serving("--role", "colocated", *SMOLLM2) as server:
        assert f"({KINDS[kind]}, cpu)" in server.log
        assert "this CPU is taken for the one of" in server.log
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        answer = server.post("/v1/completions", body)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, " Paris"), answer.text


@pytest.mark.full
@pytest.mark.parametrize(("prefill_kind", "decode_kind"), [("avx2", "bf16"), ("bf16", "avx2")])
def test_a_pair_on_different_kinds_is_refused_naming_both_dtypes(
    monkeypatch: pytest.MonkeyPatch, prefill_kind: str, decode_kind: str
) -> None:
    monkeypatch.setenv(CPUINFO_VARIABLE, cpuinfo(prefill_kind))
    with closing(Server("--role", "prefill", *STUB)) as prefill:
        monkeypatch.setenv(CPUINFO_VARIABLE, cpuinfo(decode_kind))
        with closing(Server("--role", "decode", "--prefill", prefill.url, *STUB)) as decode, running(prefill):
            ours, theirs = f"{KINDS[prefill_kind]} at the prefill server", f"{KINDS[decode_kind]} at stage 0 of the"
            refusal = f"dtype_mismatch: dtype: {ours} (model {STUB[1]}), {theirs} decode server (model {STUB[1]})"
            wait_until(lambda: refusal in decode.log, 60, f"the prefill server refuses\n{decode.log}")
            wait_until(lambda: refusal in prefill.log, 10, f"it says so itself\n{prefill.log}")
            answers = [decode.get("/ready"), decode.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert all(refusal in answer.json()["error"]["message"] for answer in answers)
            assert decode.end() == 0
