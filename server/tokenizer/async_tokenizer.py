"""Tokenization outside the event loop, on a few threads; the tokenizers library releases the GIL."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.server.tokenizer.tokenizer import Tokenizer

THREADS = 2
MAX_CACHED_STOPS = 1024


class AsyncTokenizer:
    """The slow methods of a Tokenizer as coroutines."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._stop_ids: dict[str, tuple[int, ...]] = {}

    async def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. Raises HeadraceError (400) for messages that the chat template refuses."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.tokenizer.encode_chat, messages)

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.tokenizer.decode, ids)

    async def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of tokens that contain a whole stop string (see Tokenizer.stop_ids), cached by string."""
        loop = asyncio.get_running_loop()
        for stop in stops:
            if stop not in self._stop_ids:
                found = await loop.run_in_executor(self._executor, self.tokenizer.stop_ids, (stop,))
                self._remember(stop, found)
        return tuple(dict.fromkeys(token for stop in stops for token in self._stop_ids.get(stop, ())))

    def _remember(self, stop: str, found: tuple[int, ...]) -> None:
        if len(self._stop_ids) >= MAX_CACHED_STOPS:  # clients choose the strings; drop the oldest
            del self._stop_ids[next(iter(self._stop_ids))]
        self._stop_ids[stop] = found

    def close(self) -> None:
        """Stop the threads; pending calls are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
