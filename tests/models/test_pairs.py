"""Models of the zoo on a pair of servers: two prefill stages hand over to a decode server, which says what transformers
says."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.expert_models import TOKENS, clear_texts
from tests.e2e.harness import pair, wait_until
from tests.e2e.texts import check_together
from tests.models.architectures import ARCHITECTURES
from tests.models.published import publish_in_blocks, publish_in_mxfp4
from tests.models.zoo import save_for_servers, save_plainly

LENGTHS = (5, 50, 130)
FLAGS = ("--dtype", "float32", "--kv-pages", "128", "--chunk-tokens", "32", "--max-model-len", "512", "--threads", "1")
LIBRARY = ("--decoder", "library")
FREED = ("gemma2", "gemma3", "mimo-v2-flash", "gemma4")  # windows beside layers of other shapes, and in one stage


PUBLISHING: dict[str, Callable[[Path, Any], None]] = {
    "deepseek-v3": publish_in_blocks,
    "gpt-oss": publish_in_mxfp4,
    "gemma3": save_plainly,
}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if not each.refused])
def test_texts_behind_a_handoff_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, LENGTHS, *LIBRARY)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt-oss", *FREED])
def test_texts_behind_a_handoff_of_windows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of one and of several laps around a ring of 128 places; the rest of a window is not handed over."""
    check(name, tmp_path, (5, 130, 400), *LIBRARY, "--windows", "free")


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3.5", *PUBLISHING])
def test_published_folders_from_two_stages_to_two_shards(name: str, tmp_path: Path) -> None:
    """Latents in blocks of float8, experts in MXFP4, states, and windows."""
    more = ("--windows", "free") if name == "gemma3" else ()
    lengths = (5, 130, 400) if more else LENGTHS
    decoder = "native" if name == "deepseek-v3" else "library"
    check(
        name, tmp_path, lengths, "--decoder", decoder, *more, save=PUBLISHING.get(name, save_plainly), at=("--tp", "2")
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3.5", "gpt-oss"])
def test_two_shards_hand_over_to_two_stages(name: str, tmp_path: Path) -> None:
    """What both shards have, states, is handed over once."""
    check(name, tmp_path, LENGTHS, *LIBRARY, of=("--tp", "2"), at=("--pp", "2"))


def check(
    name: str,
    folder: Path,
    lengths: Sequence[int],
    *more: str,
    save: Callable[[Path, Any], None] = save_plainly,
    of: tuple[str, ...] = (),
    at: tuple[str, ...] = (),
) -> None:
    """more: flags of both servers. of: further ones of the prefill server, by default two stages. at: of the decode
    server."""
    architecture = ARCHITECTURES[name]
    model = save_for_servers(name, folder, save)
    rotated = architecture.fields.get("original_max_position_embeddings", 0)  # shorter ones otherwise by transformers
    texts = clear_texts(folder, [length for length in lengths if length > rotated], model)
    flags = ("--model", str(folder), *FLAGS, *more)
    of = of or ("--pp", "2" if architecture.stages else "1")
    with pair((*flags, *of), (*flags, *at)) as (prefill, decode):
        info = prefill.get("/server_info").json()
        assert info["decoder"] == more[1]
        assert isinstance(info["same_bits"], bool) or more[1] == "native"
        check_together(decode, texts, TOKENS)
        check_together(decode, texts, TOKENS)  # from warm prefix caches
        wait_until(lambda: prefill.total("headrace_bytes_sent_total") > 0, 5, "the stages' counters, once a second")
