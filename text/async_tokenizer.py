"""Tokenization outside the event loop, on a few threads; the tokenizers library releases the GIL."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.text.chat_template import TemplateUse
from headrace.text.tokenizer import Tokenizer, check_text_bytes

THREADS = 2
MAX_CACHED_STOPS = 1024
T = TypeVar("T")
LONG = 1 << 16  # characters, or ids, that take tens of milliseconds; they have a thread of their own


class AsyncTokenizer:
    """The slow methods of a Tokenizer as coroutines. max_model_len: prompts of as many tokens are refused, 0: none."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int = 0) -> None:
        self.tokenizer = tokenizer
        self._limit = max_model_len
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._for_long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self._stop_ids: dict[str, tuple[int, ...]] = {}

    async def encode(self, text: str, field: str = "prompt", *, special: bool = True) -> list[int]:
        """Token ids of a plain prompt. field: where the body has it. special: see Tokenizer.encode(). Raises
        HeadraceError (400) for one that is too long."""
        work = partial(self.tokenizer.encode, text, self._limit, field, special=special)
        return await asyncio.get_running_loop().run_in_executor(self._fit(len(text)), work)

    async def encode_open(self, text: str, field: str = "prompt") -> tuple[list[int], int]:
        """The same, and how many of the ids are not expected to change whatever text follows."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._fit(len(text)), self.tokenizer.encode_open, text, self._limit, field)

    async def cut(self, text: str, tokens: int) -> str:
        """See Tokenizer.cut()."""
        return await asyncio.get_running_loop().run_in_executor(self._fit(len(text)), self.tokenizer.cut, text, tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str = "messages",
        tools: Sequence[Mapping[str, Any]] = (),
        use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
    ) -> list[int]:
        """Token ids of a conversation. Raises HeadraceError (400) for messages that are too long, or that the chat
        template refuses."""
        return await self._chat(self.tokenizer.encode_chat, messages, field, tools, use)

    async def encode_open_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        field: str = "messages",
        tools: Sequence[Mapping[str, Any]] = (),
        use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
    ) -> tuple[list[int], int]:
        """The same, and how many of the ids are not expected to change whatever messages follow."""
        return await self._chat(self.tokenizer.encode_open_chat, messages, field, tools, use)

    async def _chat(
        self,
        encode: Callable[..., T],
        messages: Sequence[Mapping[str, Any]],
        field: str,
        tools: Sequence[Mapping[str, Any]],
        use: TemplateUse,
    ) -> T:
        length = sum(_length(message["content"]) + len(message.get("reasoning_content", "")) for message in messages)
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        others = [*tools, *calls, *use.variables.values()]
        with suppress(RecursionError):  # rendering says so
            size = len(msgspec.json.encode(others))
            length += size
            if self._limit:  # a filter of the template may hold the GIL for all of them
                check_text_bytes(size, self._limit, field, " of tools, calls and variables")
        return await asyncio.get_running_loop().run_in_executor(
            self._fit(length), encode, messages, self._limit, field, tools, use
        )

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._fit(len(ids)), self.tokenizer.decode_long, ids)

    async def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of tokens that contain a whole stop string (see Tokenizer.stop_ids), cached by string."""
        loop = asyncio.get_running_loop()
        for stop in stops:
            if stop not in self._stop_ids:
                found = await loop.run_in_executor(self._executor, self.tokenizer.stop_ids, (stop,))
                self._remember(stop, found)
        return tuple(dict.fromkeys(token for stop in stops for token in self._stop_ids.get(stop, ())))

    def _fit(self, length: int) -> ThreadPoolExecutor:
        """The threads for an input of this length: short ones do not wait for long ones."""
        return self._for_long if length > LONG else self._executor

    def _remember(self, stop: str, found: tuple[int, ...]) -> None:
        if len(self._stop_ids) >= MAX_CACHED_STOPS:  # clients choose the strings; drop the oldest
            del self._stop_ids[next(iter(self._stop_ids))]
        self._stop_ids[stop] = found

    def close(self) -> None:
        """Stop the threads; pending calls are cancelled."""
        for executor in (self._executor, self._for_long):
            executor.shutdown(wait=False, cancel_futures=True)


def _length(content: str | Sequence[Mapping[str, str]] | None) -> int:
    """Characters of a message's text, or of its parts."""
    if isinstance(content, str) or not content:
        return len(content or "")
    return sum(len(part.get("text", "")) for part in content)
