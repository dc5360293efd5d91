"""Texts through prefill → decode are those of transformers, for lengths around page and chunk edges."""

import pytest

from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.texts import check_together

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 1000)
SHORT = (1, 16, 17, 64, 65)
LONG = 5200
TOKENS = 8


def check(server: Server, lengths: tuple[int, ...]) -> None:
    """All prompts at once."""
    prompts = [gold.story_ids()[:length] for length in lengths]
    check_together(server, {prompt: gold.greedy_text(prompt, TOKENS) for prompt in prompts}, TOKENS)


# Page size at the prefill and at the decode side (equal, and different both ways), and chunk tokens.
GEOMETRIES = [(16, 16, 64), (64, 64, 512), (16, 64, 2048), (64, 16, 64), (16, 16, 512), (64, 64, 2048)]


def test_handed_over_texts_equal_transformers() -> None:
    hand_over(16, 64, 32, SHORT)


@pytest.mark.full
@pytest.mark.parametrize(("page", "peer_page", "chunk"), GEOMETRIES)
def test_texts_of_many_lengths_equal_transformers(page: int, peer_page: int, chunk: int) -> None:
    hand_over(page, peer_page, chunk, LENGTHS)


@pytest.mark.full
@pytest.mark.parametrize(("page", "peer_page", "chunk"), GEOMETRIES)
def test_a_long_prompt_handed_over_equals_transformers(page: int, peer_page: int, chunk: int) -> None:
    hand_over(page, peer_page, chunk, (LONG,))


def hand_over(page: int, peer_page: int, chunk: int, lengths: tuple[int, ...]) -> None:
    common = ("--dtype", "float32", "--chunk-tokens", str(chunk))
    with pair((*common, "--page-size", str(page)), (*common, "--page-size", str(peer_page), "--threads", "1")) as (
        prefill,
        decode,
    ):
        check(decode, lengths)
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages back")
            assert server.metrics()["headrace_checksum_failures_total"] == 0
        wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 5, "the stages' counters, once a second")
        # Again, now from cached prefixes on both sides: nothing may change.
        check(decode, lengths)


@pytest.mark.full
def test_colocated_texts_equal_transformers() -> None:
    with serving("--role", "colocated", "--dtype", "float32") as server:
        check(server, LENGTHS)
