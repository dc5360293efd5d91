"""The command headrace bench serve, against servers whose answers and times are known."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import commands as cli
from headrace.core.runtime.process import MISTAKE
from headrace.tools.bench.outcome import BenchOutcome
from tests.tools.bench.event_server import (
    STREAM,
    TOKEN,
    WHOLE,
    EventServer,
    answer,
    chunk,
    event,
    reply_at_once,
    serving,
)

QUICK = ("--num-warmups", "0", "--input-len", "8", "--output-len", "2", "--seed", "1")


def bench(server: EventServer, folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    out = folder / "out.json"
    assert cli.main(["bench", "serve", server.url, *QUICK, "--json", str(out), *flags]) == status
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["bench", "serve", *arguments]) == MISTAKE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def test_the_table_json_and_what_was_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(EventServer(reply_at_once)) as server:
        flags = ("--num-prompts", "5", "--num-warmups", "1", "--ttft-slo", "10000", "--percentiles", "50,99.9")
        found = bench(server, tmp_path, *flags)
    out, err = capsys.readouterr()
    assert err == "", "progress is for terminals"
    assert "5 sent, 5 ok, 0 failed" in out
    assert "100.0 % (TTFT ≤ 10000 ms)" in out
    lines = out.splitlines()
    header = next(at for at, line in enumerate(lines) if line.startswith("ms "))
    table = lines[header : header + 6]
    assert table[0].split() == ["ms", "mean", "p50", "p99.9", "max"]
    assert [line.split("  ")[0] for line in table[1:]] == ["TTFT", "TPOT", "ITL", "E2E", "client lag"]
    assert len(server.posts) == 6, "one warm-up request"
    post = server.posts[-1]
    assert post["path"] == "/v1/completions"
    assert (post["model"], post["max_tokens"], post["ignore_eos"], post["temperature"]) == ("m", 2, True, 0.0)
    assert len(post["prompt"]) == 8
    summary = found["summary"]
    assert (summary["input_tokens"], summary["cached_tokens"], summary["output_tokens"]) == (35, 15, 10)
    assert {len(request["token_s"]) for request in found["requests"]} == {2}


def test_a_seed_gives_the_same_prompts_and_none_gives_others(tmp_path: Path) -> None:
    with serving(EventServer(reply_at_once)) as server:
        for _ in range(2):
            bench(server, tmp_path, "--num-prompts", "3")
        assert cli.main(["bench", "serve", server.url, "--num-warmups", "0", "--num-prompts", "3"]) == 0
    prompts = [post["prompt"] for post in server.posts]
    key = sorted(map(str, prompts[:3]))
    assert key == sorted(map(str, prompts[3:6]))
    assert key != sorted(map(str, prompts[6:]))


def test_the_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    """No answer is given before the last request has come: a client that waited would never end."""
    count, arrived = 20, 0
    all_here = asyncio.Event()

    async def hold(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_here.set()
        await all_here.wait()
        writer.write(WHOLE)

    with serving(EventServer(hold)) as server:
        found = bench(server, tmp_path, "--num-prompts", str(count), "--request-rate", "200", "--timeout", "60")
    assert found["summary"]["ok"] == count
    assert found["summary"]["most_open"] == count
    assert len({request["due_s"] for request in found["requests"]}) == count


def test_waiting_for_a_free_place_counts_as_latency(tmp_path: Path) -> None:
    """Two at a time, all due at once: those that wait in the client are due at 0 all the same."""
    with serving(EventServer(reply_at_once)) as server:
        found = bench(server, tmp_path, "--num-prompts", "6", "--request-rate", "inf", "--max-concurrency", "2")
    assert found["summary"]["most_open"] <= 2
    assert {request["due_s"] for request in found["requests"]} == {0.0}
    first, *_, last = (msg_outcome(request) for request in found["requests"])
    assert last.lag_s > first.lag_s
    assert last.ttft_s > last.lag_s


def msg_outcome(request: dict[str, Any]) -> BenchOutcome:
    return BenchOutcome(**{**request, "token_s": tuple(request["token_s"])})


def test_the_closed_loop_keeps_so_many_open(tmp_path: Path) -> None:
    waiting: list[asyncio.Event] = []

    async def in_threes(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answers when three are open."""
        mine = asyncio.Event()
        waiting.append(mine)
        if len(waiting) == 3:
            for each in waiting:
                each.set()
            waiting.clear()
        await mine.wait()
        writer.write(WHOLE)

    with serving(EventServer(in_threes)) as server:
        found = bench(server, tmp_path, "--num-prompts", "9", "--max-concurrency", "3", "--timeout", "60")
    assert found["summary"]["ok"] == 9
    assert found["summary"]["most_open"] == 3


def test_a_trace_has_the_times_lengths_and_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["0,20,3,g,8", "0.4,30,1,g,8", "0.6,9,2,,"]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens,prefix_group,prefix_tokens", *rows]))
    with serving(EventServer(reply_at_once)) as server:
        out = tmp_path / "out.json"
        flags = ("--trace", str(trace), "--speedup", "4", "--max-input-len", "25", "--num-warmups", "0")
        assert cli.main(["bench", "serve", server.url, "--json", str(out), *flags]) == 0
    assert sorted(request["due_s"] for request in json.loads(out.read_bytes())["requests"]) == [0.0, 0.1, 0.15]
    assert [(len(post["prompt"]), post["max_tokens"]) for post in server.posts] == [(20, 3), (25, 1), (9, 2)]
    one, other, last = (post["prompt"] for post in server.posts)
    assert one[:8] == other[:8]
    assert one[8:16] != other[8:16]
    assert last[:8] != one[:8]


def test_failures_are_counted_by_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def reply(number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if number == 0:
            writer.write(WHOLE)
        elif number == 1:
            writer.write(answer(429, {"error": {"code": "queue_full", "message": "come later"}}))
        elif number == 2:
            writer.write(STREAM + event(TOKEN))
            writer.close()
        elif number == 3:
            writer.write(STREAM + event(TOKEN) + event({"error": {"code": "lost", "message": "gone"}}) + chunk(b""))
        elif number == 4:
            writer.write(b"SMTP ready\r\n\r\n")
        else:
            await asyncio.Event().wait()

    with serving(EventServer(reply)) as server:
        flags = ("--num-prompts", "6", "--max-concurrency", "1", "--timeout", "3", "--ttft-slo", "10000")
        found = bench(server, tmp_path, *flags)
    failed = {"429 queue_full": 1, "connection lost": 2, "stream error lost": 1, "timeout": 1}
    assert found["summary"]["failed"] == failed
    assert found["summary"]["goodput"]["share"] == pytest.approx(1 / 6)
    out = capsys.readouterr().out
    assert "6 sent, 1 ok, 5 failed" in out
    assert "failed: 429 queue_full" in out
    assert "come later" in out


def test_nothing_ok_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer(503, {"error": {"code": "not_ready", "message": "loading"}}))

    with serving(EventServer(refuse)) as server:
        bench(server, tmp_path, "--num-prompts", "2", status=1)
        assert "No request was answered." in capsys.readouterr().out
        err = refused(capsys, server.url, "--num-prompts", "2")
    assert "the first request failed: 503 not_ready: loading" in err


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_prints_what_was_measured(
    signalled: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def reply(number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if number == 3:
            os.kill(os.getpid(), signalled)
            await asyncio.Event().wait()
        writer.write(WHOLE)

    before = signal.getsignal(signalled)
    with serving(EventServer(reply)) as server:
        flags = ("--num-prompts", "10", "--max-concurrency", "1", "--timeout", "60")
        found = bench(server, tmp_path, *flags, status=128 + signalled)
    assert signal.getsignal(signalled) == before
    assert found["interrupted"]
    assert (found["summary"]["sent"], found["summary"]["ok"], found["summary"]["interrupted"]) == (4, 3, 1)
    out, err = capsys.readouterr()
    assert "4 sent, 3 ok, 0 failed, 1 interrupted" in out
    assert "TTFT" in out
    assert "interrupted" in err


def test_a_prefill_server_is_asked_for_prompts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def prefill(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "cached_tokens": 5}
        writer.write(answer(200, {"first_token": {"id": 4}, "usage": usage}))

    with serving(EventServer(prefill, role="prefill")) as server:
        found = bench(server, tmp_path, "--num-prompts", "2")
    post = server.posts[0]
    assert (post["path"], post["handoff"], post["max_tokens"]) == ("/v1/prefill", "none", 1)
    assert len(post["prompt_token_ids"]) == 8
    assert found["summary"]["cached_tokens"] == 10
    assert found["summary"]["tpot_ms"] is None
    assert "8 tokens in, the first token alone" in capsys.readouterr().out


def test_prompts_from_a_file(tmp_path: Path) -> None:
    texts = tmp_path / "prompts.txt"
    texts.write_text("one\n\ntwo\n")
    with serving(EventServer(reply_at_once, role="")) as server:
        flags = ("--prompts", str(texts), "--num-prompts", "3", "--num-warmups", "0", "--max-concurrency", "1")
        assert cli.main(["bench", "serve", server.url, *flags]) == 0
    assert [post["prompt"] for post in server.posts] == ["one", "two", "one"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    with serving(EventServer(reply_at_once)) as server:
        bench(server, tmp_path, "--num-prompts", "3", "--plot", str(picture), "--tpot-slo", "5")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("headrace.tools.output.find_spec", lambda name: None)
    assert "pip install 'headrace[plot]'" in refused(capsys, "http://127.0.0.1:9", "--plot", "x.png")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no answer from http://127.0.0.1:9 (" in refused(capsys, "http://127.0.0.1:9")


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(EventServer(reply_at_once, key="secret")) as server:
        assert "set HEADRACE_API_KEY" in refused(capsys, server.url)
        monkeypatch.setenv("HEADRACE_API_KEY", "secret")
        assert bench(server, tmp_path, "--num-prompts", "2")["summary"]["ok"] == 2


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(EventServer(reply_at_once, models=("llama", "qwen"))) as server:
        assert "choose one with --model: llama, qwen" in refused(capsys, server.url)
        assert "no model 'lama'; did you mean llama?" in refused(capsys, server.url, "--model", "lama")


MODEL = {"id": "m", "max_model_len": 4096}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/models", {"data": [{**MODEL, "max_model_len": wrong}]}) for wrong in ("x", -1, 1.5, 1 << 70, [], {})),
        *(("/v1/models", {"data": [{**MODEL, "id": wrong}]}) for wrong in (1, None, [], {}, "x" * 10_000)),
        *(("/v1/models", wrong) for wrong in ([], {}, 1, {"data": 1}, {"data": [1]}, {"data": {}}, "\x1b]0;title\x07")),
    ],
)
def test_what_a_server_says_of_itself_is_checked(path: str, body: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = EventServer(reply_at_once)
    server.answers[path] = 200, body
    with serving(server):
        assert "is no server with OpenAI's API" in refused(capsys, server.url)


@pytest.mark.parametrize("info", [{"instance_id": 1, "version": "1"}, {"instance_id": "i", "version": []}, [], 7])
def test_a_server_of_another_make_may_say_anything_of_itself(info: Any, tmp_path: Path) -> None:
    server = EventServer(reply_at_once)
    server.answers["/server_info"] = 200, info
    with serving(server):
        assert bench(server, tmp_path, "--num-prompts", "1")["server"] == ""


def test_names_and_errors_of_a_server_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title = "\x1b]0;owned\x07\x9b31m"

    async def fail(_number: int, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer(500, {"error": {"message": title, "code": title}}))

    server = EventServer(fail, models=(title, "m"), role=title)
    with serving(server):
        refused(capsys, server.url)
        refused(capsys, server.url, "--model", "n")
        bench(server, tmp_path, "--model", title, "--num-prompts", "2", status=1)
        out = "".join(capsys.readouterr())
        server.answers["/v1/models"] = 500, title
        out += refused(capsys, server.url)
    assert "\\x1b]0;owned" in out
    assert all(char.isprintable() or char == "\n" for char in out)


def test_prompts_that_the_model_cannot_take(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(EventServer(reply_at_once)) as server:
        err = refused(capsys, server.url, "--input-len", "4090", "--output-len", "7")
    assert "4,097 tokens, the model has 4,096" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "0"), "--request-rate: expected a number above 0"),
        (("--request-rate", "nan"), "--request-rate: expected a number"),
        (("--input-len", "9-3"), "--input-len: the range 9-3 is empty"),
        (("--input-len", "x"), "--input-len: expected a whole number, at least 1, got 'x'"),
        (("--percentiles", "50,101"), "--percentiles: expected numbers from 0 to 100"),
        (("--prefix-len", "600"), "--prefix-len 600 is longer than the shortest prompt"),
        (("--trace", "t.csv", "--input-len", "5"), "--input-len has no meaning beside --trace"),
        (("--trace", "t.csv", "--prompts", "p"), "give one of them"),
        (("--trace", "no-such.csv"), "cannot read no-such.csv"),
        (("--speedup", "2"), "--speedup needs the timestamps of a --trace"),
        (("--burstiness", "2"), "--burstiness needs --request-rate"),
        (("--max-input-len", "5"), "write --input-len"),
        (("--endpoint", "/generate"), "expected /v1/completions or /v1/prefill"),
        (("--plot", "x.svg"), "ends in .png"),
        (("--json", "/no/such/folder/x"), "in no folder that exists"),
        (("--request-rat", "1"), "unknown argument --request-rat; did you mean --request-rate?"),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "http://127.0.0.1:9", *flags)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_wrong_addresses(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected the address of a server such as http://127.0.0.1:8000" in refused(capsys, url)
