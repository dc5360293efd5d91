"""Images in request bodies: what is read, where their tokens are, and what is refused."""

import asyncio
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from struct import pack as struct_pack
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.responses import RedirectResponse, Response
from transformers import AutoImageProcessor

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Tokens
from headrace.core.types.packed import unpack
from headrace.core.types.requests.images import ImageTerms, images_digest
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.image_models import BREAK, EDGE, END, IMAGE, START, data_url, part_of, picture, write_texts
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, listening_app, make_config

QWEN = ImageTerms("grid", IMAGE, EDGE, 2, frames=2)
PIXTRAL = ImageTerms("rows", IMAGE, EDGE, 2)
LENGTH = 200
PLACE = "messages[0].content[0].image_url.url"


def computing(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    return [Tokens(rid=submit.rid, tokens=(7,)), finished(submit.rid)]


def write_files(name: str, folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')  # its weights are not looked at
    write_texts(name, folder)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """Made once: it is converted by transformers, in a process of its own."""
    with TemporaryDirectory() as folder:
        write_files(name, Path(folder))
        return load_tokenizer(folder, "")


@asynccontextmanager
async def serving(
    folder: Path, terms: ImageTerms | None = QWEN, name: str = "qwen3-vl", no_images: str = "", **server: Any
) -> AsyncIterator[tuple[FakeLink, httpx.AsyncClient]]:
    write_files(name, folder)
    tokenizer = tokenizer_of(name)
    config = make_config(tokenizer, length=LENGTH, **server)
    model = msgspec.structs.replace(config.model, model=str(folder), images=terms, no_images=no_images)
    link = FakeLink(computing)
    service = Service(link, msgspec.structs.replace(config, model=model), tokenizer=tokenizer)
    await service.start()
    try:
        await service.readiness.wait_engine_ready()
        async with client(service) as http:
            yield link, http
    finally:
        await service.stop()


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 2}


def submitted(link: FakeLink) -> Submit:
    return [each for each in link.sent if isinstance(each, Submit)][-1]


@in_loop
async def test_a_question_becomes_tokens_and_pixels(tmp_path: Path) -> None:
    one, two = picture(1), picture(2, 60, 60, "JPEG")
    async with serving(tmp_path) as (link, http):
        reply = await http.post(
            "/v1/chat/completions", json=chat(part_of("a"), part_of(one), part_of("b"), part_of(two))
        )
        assert reply.status_code == 200, reply.text
        submit = submitted(link)
        text = await http.post("/v1/chat/completions", json=chat(part_of("a"), part_of("b")))
        assert text.status_code == 200
        assert (submitted(link).images, submitted(link).terms.image_digest) == ((), "")
    first, second = submit.images
    assert (first.rows, first.columns, second.rows, second.columns) == (2, 3, 2, 2)
    assert (first.start, first.length, second.start, second.length) == (2, 6, 11, 4)
    assert unpack(submit.prompt).tolist() == [97, START, *[IMAGE] * 6, END, 98, START, *[IMAGE] * 4, END]
    assert first.digest == sha256(one).hexdigest()
    assert first.shape == (24, 3, 14, 14)
    assert len(first.pixels) == 24 * 3 * 14 * 14
    assert submit.terms.image_digest == images_digest(submit.images)


@pytest.mark.parametrize(("name", "terms"), [("qwen3-vl", QWEN), ("mistral3", PIXTRAL)])
@in_loop
async def test_scaled_pixels_are_those_of_the_models_processor(tmp_path: Path, name: str, terms: ImageTerms) -> None:
    file = picture(1, 150, 80)
    async with serving(tmp_path, terms, name) as (link, http):
        reply = await http.post("/v1/chat/completions", json=chat(part_of(file)))
        assert reply.status_code == 200, reply.text
    (given,) = submitted(link).images
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = processor(images=[Image.open(BytesIO(file))], return_tensors="np")["pixel_values"]
    pixels = np.frombuffer(given.pixels, np.uint8).reshape(given.shape)
    scale, shift = (np.array(each)[:, None, None] for each in (given.scale, given.shift))
    scaled = pixels * scale + shift
    if terms.layout == "grid":
        scaled = np.stack([scaled, scaled], axis=2).reshape(expected.shape)
    np.testing.assert_allclose(scaled, expected, atol=1e-5)


@in_loop
async def test_rows_of_tokens_end_in_tokens_of_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path, PIXTRAL, "mistral3") as (link, http):
        reply = await http.post("/v1/chat/completions", json=chat(part_of(picture(1)), part_of("b")))
        assert reply.status_code == 200, reply.text
    (image,) = submitted(link).images
    row = [IMAGE] * image.columns
    assert unpack(submitted(link).prompt).tolist() == [*([*row, BREAK] * image.rows)[:-1], END, 98]
    assert (image.start, image.length, image.mrope) == (0, image.rows * (image.columns + 1) - 1, False)


@in_loop
async def test_other_routes_take_them(tmp_path: Path) -> None:
    url = data_url(picture(1))
    ids = [97, START, *[IMAGE] * 6, END]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2}),
        ("/v1/prefill", {"prompt_token_ids": ids, "images": [url], "handoff": "none"}),
        ("/v1/prefill", {**chat(part_of("a"), part_of(picture(1))), "handoff": "none"}),
    ]
    async with serving(tmp_path) as (link, http):
        for path, body in bodies:
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert unpack(submitted(link).prompt).tolist() == ids
            assert [(each.start, each.length) for each in submitted(link).images] == [(2, 6)]
        reply = await http.post("/tokenize", json={"messages": chat(part_of("a"), part_of(picture(1)))["messages"]})
        assert json_of(reply)["tokens"] == ids


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that says it has that many pixels."""
    chunks = (b"IHDR" + struct_pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(1000)))
    framed = [struct_pack(">I", len(each) - 4) + each + struct_pack(">I", zlib.crc32(each)) for each in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


REFUSED: list[tuple[Any, int, str, str]] = [
    (image("data:image/png;base64,!!!"), 400, PLACE, "no valid base64"),
    (image("data:image/png,abc"), 400, PLACE, "no data URL in base64"),
    (image("data:;base64," + b64encode(b"hello").decode()), 400, PLACE, "no image that can be read as PNG"),
    (image(data_url(picture(1)[:200])), 400, PLACE, "no image that can be read"),
    (image(data_url(picture(1, 20, 20, "TIFF"))), 400, PLACE, "no image that can be read"),
    (image(data_url(bytes(20_000))), 413, PLACE, "--max-image-bytes allows 9000"),
    (image(data_url(bomb(30_000, 30_000))), 413, PLACE, "30000 by 30000 pixels; --max-image-pixels allows 20000"),
    (image(data_url(picture(1, 2, 601))), 400, PLACE, "processor does not take this image"),
    (image("http://example.com/a.png"), 400, PLACE, "--allowed-image-host example.com"),
    (image("https://Example.com:8443/a.png"), 400, PLACE, "--allowed-image-host example.com:8443"),
    (image("file:///etc/passwd"), 400, PLACE, "has to be a data: URL"),
    (image("http://user@example.com/"), 400, PLACE, "has to be a data: URL"),
    (image("http://[::1"), 400, PLACE, "no URL"),
    ({"type": "image_url"}, 400, PLACE.removesuffix(".url"), "required"),
    ({"type": "text", "text": "x", "image_url": "y"}, 400, PLACE.removesuffix(".url"), "has no image"),
    ({"type": "image_url", "text": "x", "image_url": "y"}, 400, "messages[0].content[0].text", "has no text"),
]


@in_loop
async def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, max_image_bytes=9000, max_image_pixels=20_000) as (link, http):
        for part, status, field, words in REFUSED:
            reply = await http.post("/v1/chat/completions", json=chat(part))
            assert reply.status_code == status, reply.text
            error = json_of(reply)["error"]
            assert error["param"] == field
            assert words in error["message"]
    assert not [each for each in link.sent if isinstance(each, Submit)]


@in_loop
async def test_images_that_do_not_belong_to_the_prompt_are_refused(tmp_path: Path) -> None:
    file, url = part_of(picture(1)), data_url(picture(1))
    bodies: list[tuple[str, dict[str, Any], int, str]] = [
        ("/v1/chat/completions", chat(file, part_of("<|image_pad|>")), 400, "2 places for images"),
        ("/v1/chat/completions", chat(file, file, file), 413, "3 images; --max-images allows 2"),
        ("/v1/chat/completions", chat(file, role="system"), 400, "images of users"),
        ("/v1/prefill", {"prompt": "x", "images": [url], "handoff": "none"}, 400, "those of prompt_token_ids"),
        ("/v1/prefill", {"prompt_token_ids": [IMAGE] * 5, "images": [url], "handoff": "none"}, 400, "from position 0"),
        ("/v1/prefill", {"prompt_token_ids": [IMAGE] * 7, "images": [url], "handoff": "none"}, 400, "from position 6"),
        ("/v1/prefill", {"prompt_token_ids": [5], "images": [url], "handoff": "none"}, 400, "0 places for images"),
    ]
    async with serving(tmp_path, max_images=2) as (_, http):
        for path, body, status, words in bodies:
            reply = await http.post(path, json=body)
            assert reply.status_code == status, reply.text
            assert words in json_of(reply)["error"]["message"]


@pytest.mark.parametrize("missing", ["encoder", "tokens", "fitting processor"])
@in_loop
async def test_models_that_take_no_images_say_why(tmp_path: Path, missing: str) -> None:
    terms, reason, words = {
        "encoder": (None, "this model has no image encoder", "this model has no image encoder"),
        "tokens": (PIXTRAL, "", "lacks [IMG_BREAK]"),
        "fitting processor": (msgspec.structs.replace(QWEN, pixels=32), "", "does not fit its encoder"),
    }[missing]
    async with serving(tmp_path, terms, no_images=reason) as (_, http):
        reply = await http.post("/v1/chat/completions", json=chat(part_of(picture(1))))
        plain = await http.post("/v1/chat/completions", json=chat(part_of("x")))
    assert plain.status_code == 200
    error = json_of(reply)["error"]
    assert (reply.status_code, error["param"]) == (400, PLACE)
    assert words in error["message"]


@in_loop
async def test_images_are_fetched_from_hosts_that_are_allowed(tmp_path: Path) -> None:
    app, file = FastAPI(), picture(1)

    @app.get("/a.png")
    async def sent() -> Response:
        return Response(file, media_type="image/png")

    @app.get("/away")
    async def away() -> Response:
        return RedirectResponse("/a.png")

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(20_000))

    async with listening_app(app) as url:
        host = url.removeprefix("http://")
        allowed = (host, f"localhost:{host.partition(':')[2]}")
        async with serving(tmp_path, allowed_image_hosts=allowed, max_image_bytes=9000) as (link, http):
            reply = await http.post("/v1/chat/completions", json=chat(image(f"{url}/a.png")))
            assert reply.status_code == 200, reply.text
            assert submitted(link).images[0].digest == sha256(file).hexdigest()
            for path, status, words in (
                (f"{url}/away", 400, "redirects are not followed"),
                (f"{url}/none", 400, "answered 404"),
                (f"{url}/large", 413, "--max-image-bytes"),
                (f"{url.replace('127.0.0.1', 'localhost')}/a.png", 400, "which is not public"),
                ("http://127.0.0.1:1/a.png", 400, "--allowed-image-host 127.0.0.1:1"),
            ):
                reply = await http.post("/v1/chat/completions", json=chat(image(path)))
                assert reply.status_code == status, reply.text
                assert json_of(reply)["error"]["param"] == PLACE
                assert words in json_of(reply)["error"]["message"]


@in_loop
async def test_images_take_no_more_memory_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from when they are read until the request has ended, however it ends."""
    file = picture(1)
    taken = len(file) + 24 * 3 * 14 * 14
    monkeypatch.setattr("headrace.server.frontend.request.image_memory.TOTAL_BYTES", 2 * taken + 100)
    body = chat(part_of(file), part_of("what?"))

    async def say(http: httpx.AsyncClient, **changes: Any) -> tuple[int, str]:
        reply = await http.post("/v1/chat/completions", json=body | changes)
        return reply.status_code, reply.text

    async with serving(tmp_path) as (link, http):
        answering = link.script
        for _ in range(3):
            assert (await say(http))[0] == 200
            assert (await say(http, **chat(part_of(file), part_of("<|image_pad|>"))))[0] == 400
            assert (await say(http, **chat(*[part_of(file)] * 3)))[0] == 429
        link.script = lambda _link, _submit: ()
        open_ones = [asyncio.create_task(say(http)) for _ in range(2)]
        while len([each for each in link.sent if isinstance(each, Submit)]) < 5:
            await asyncio.sleep(0.01)
        status, text = await say(http)
        assert (status, f"images of open requests take {2 * taken} bytes" in text) == (429, True)
        link.script = answering
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        while (await say(http))[0] == 429:
            await asyncio.sleep(0.01)
        assert (await say(http, **chat(*[part_of(file)] * 2)))[0] == 200
