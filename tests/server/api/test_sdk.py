"""The official OpenAI SDK against a real HTTP server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai import AsyncOpenAI

from headrace.core.types.errors import ErrorInfo
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, Script, failing, in_loop, listening, running, saying

CHAT: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def sdk(tokenizer: Tokenizer, script: Script) -> AsyncIterator[AsyncOpenAI]:
    async with (
        running(FakeLink(script), tokenizer, api_keys=("key",)) as service,
        listening(service) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as ai,
    ):
        yield ai


@in_loop
async def test_completions(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world", cached=1)) as ai:
        answer = await ai.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=3, max_tokens=9, seed=1)
        assert [choice.text for choice in answer.choices] == ["hello world"] * 4
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["hello", " world"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2


@in_loop
async def test_chat_with_logprobs(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world", reason="stop")) as ai:
        answer = await ai.chat.completions.create(
            model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, n=2, extra_body={"top_k": 5, "min_p": 0.1}
        )
        assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
        assert answer.choices[0].finish_reason == "stop"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.token for entry in logprobs.content] == ["hello", " world"]
        assert len(logprobs.content[0].top_logprobs) == 2


@in_loop
async def test_streams(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world 🙂")) as ai:
        options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
        chat = await ai.chat.completions.create(model="tiny", messages=CHAT, stream=True, stream_options=options)
        chunks = [chunk async for chunk in chat]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "hello world 🙂"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 7
        text = await ai.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join([c.text async for chunk in text for c in chunk.choices]) == "hello world 🙂"


@in_loop
async def test_models(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "x")) as ai:
        assert [model.id async for model in ai.models.list()] == ["tiny"]
        assert (await ai.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.models.retrieve("org/other")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@in_loop
async def test_errors_are_the_sdks_own(tokenizer: Tokenizer) -> None:
    full = ErrorInfo(code="queue_full", message="full", status=429, retry_after_s=1.0)
    async with sdk(tokenizer, failing(full)) as ai:
        with pytest.raises(openai.RateLimitError, match="full"):
            await ai.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.RateLimitError, match="full"):
            await ai.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.completions.create(model="gpt", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ai.chat.completions.create(model="tiny", messages=CHAT, temperature=9)
        with pytest.raises(openai.AuthenticationError):
            await ai.with_options(api_key="wrong").models.list()
