"""Servers of two releases beside each other, as while a fleet is replaced: texts are right in all directions."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.models import stub
from tests.e2e.other_release import Release, write_hook
from tests.e2e.texts import check_together, complete

MODEL = stub(us_per_token=50)
TOKENS = 8
LENGTHS = (1, 17, 300, 1000)


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "release"),
    [
        ("prefill", "later"),
        ("prefill", "earlier"),
        ("decode", "later"),
        ("decode", "earlier"),
    ],
)
def test_a_pair_of_two_releases(role: str, release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def server(its_role: str, *flags: str) -> Server:
        with monkeypatch.context() as environment:
            if its_role == role:
                environment.setenv("PYTHONPATH", write_hook(tmp_path, release))
            return Server("--role", its_role, *flags, "--transfer-backends", "zmq", *MODEL.flags)

    with (
        closing(server("prefill", "--pp", "2")) as prefill,
        closing(server("decode", "--prefill", prefill.url)) as decode,
        running(prefill),
        running(decode),
    ):
        prompts = [MODEL.story()[:length] for length in LENGTHS]
        check_together(decode, {prompt: MODEL.greedy_text(prompt, TOKENS) for prompt in prompts}, TOKENS)
        assert complete(decode, prompts[1], 1) == MODEL.greedy_text(prompts[1], 1)
        wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 10, "KV was sent")
        for one in (prefill, decode):
            wait_until(lambda one=one: pages_in_use(one) == 0, 10, "pages are back")
            assert "Traceback" not in one.log
    sent = {path.name for path in tmp_path.iterdir()}
    assert sent >= ({"Welcome", "Chunk", "Finished"} if role == "prefill" else {"Hello", "Reserve", "Attach", "Ack"})
