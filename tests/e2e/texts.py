"""Texts of a server beside those that are expected."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.harness import Server


def text_of(answer: httpx.Response) -> str:
    """The text of a completion."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def complete(server: Server, prompt: tuple[int, ...], tokens: int, **fields: Any) -> str:
    """The text after a prompt, greedy."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body)
    text = text_of(answer)
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    return text


def check_together(server: Server, expected: Mapping[tuple[int, ...], str], tokens: int, **fields: Any) -> None:
    """All prompts at once."""
    with ThreadPoolExecutor(len(expected)) as pool:
        texts = pool.map(lambda prompt: complete(server, prompt, tokens, **fields), expected)
        found = dict(zip(expected, texts, strict=True))
    assert {len(prompt): text for prompt, text in found.items()} == {
        len(prompt): text for prompt, text in expected.items()
    }


def check_alone(server: Server, expected: Mapping[tuple[int, ...], str], tokens: int, **fields: Any) -> None:
    """One by one."""
    for prompt, text in expected.items():
        assert complete(server, prompt, tokens, **fields) == text, len(prompt)
