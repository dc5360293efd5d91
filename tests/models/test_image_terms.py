"""Which models take images on a server, and the reason for which the others do not."""

from pathlib import Path

import pytest

from headrace.core.types.requests.images import ImageTerms
from headrace.server.config.resolve import resolve
from tests.models.architectures import ARCHITECTURES, IMAGE_TOKEN
from tests.models.zoo import make_model
from tests.server.config.test_load import configure

TERMS = {
    "qwen3-vl": ImageTerms("grid", IMAGE_TOKEN, 28, 2, levels=2, frames=2),
    "qwen2.5-vl": ImageTerms("grid", IMAGE_TOKEN, 28, 2, frames=2),
    "mistral3": ImageTerms("rows", IMAGE_TOKEN, 28, 2),
}


@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("qwen3-vl", "", ""),
        ("qwen3-vl", "--pp 2 --pp-layers 2,2", ""),
        ("qwen3-vl", "--pp 2 --pp-layers 1,3", "go into the first 2 layers, and the first stage has 1"),
        ("qwen2.5-vl", "--pp 2 --pp-layers 1,3", ""),
        ("mistral3", "", ""),
        ("gemma3-vision", "", "see each other both ways"),
        ("smollm3", "", "no encoder of images"),
        ("llama", "", "computed by our own layers"),
    ],
)
def test_terms_or_the_reason(name: str, flags: str, reason: str, tmp_path: Path) -> None:
    make_model(ARCHITECTURES[name]).save_pretrained(tmp_path)
    given = ("--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-pages", "64", *flags.split())
    model = resolve(configure(*given)).config.model
    if reason:
        assert model.images is None
        assert reason in model.no_images
    else:
        assert (model.images, model.no_images) == (TERMS[name], "")
