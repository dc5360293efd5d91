"""Images in the library's decoder: as transformers computes them, whatever the chunks and the requests beside."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.progress import LoadProgress
from headrace.core.types import packed
from headrace.core.types.requests.images import ImageInput, next_position, rotary_positions
from headrace.engine.kv.memory_plan import weight_count
from headrace.engine.library.model import encoders, load_model
from headrace.engine.library.spec import library_spec
from headrace.engine.model.checkpoint import SafetensorsCheckpoint
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import resolve_source
from headrace.engine.runner import ModelRunner
from tests.engine.models import GREEDY, Prompt, make_runner, random_tokens, reported_logprobs
from tests.models.architectures import IMAGE_BREAK, IMAGE_END, IMAGE_START, IMAGE_TOKEN
from tests.models.zoo import Saved, saver

NAMES = ("qwen3-vl", "qwen2.5-vl", "mistral3")
PATCH, MERGE, PAGE, STEPS = 14, 2, 16, 4
CLOSE = 2e-3
ROWS, COLUMNS = 3, 5
SCALE, SHIFT = (0.014, 0.015, 0.016), (-1.8, -1.9, -2.0)


class Example(NamedTuple):
    """A prompt with two images, and what transformers takes beside its tokens."""

    tokens: list[int]
    images: tuple[ImageInput, ...]
    inputs: dict[str, Tensor]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return saver(tmp_path_factory)


def image_pixels(name: str, rows: int, columns: int, seed: int) -> Tensor:
    """uint8, with the colours on the second axis."""
    shape = [1, 3, rows * PATCH * MERGE, columns * PATCH * MERGE]
    if name != "mistral3":
        shape = [rows * columns * MERGE**2, 3, PATCH, PATCH]
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def scaled(name: str, pixels: Tensor) -> Tensor:
    """What transformers takes of them."""
    found = torch.stack([pixels[:, at] * SCALE[at] + SHIFT[at] for at in range(3)], 1)
    return found if name == "mistral3" else found[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1)


def image_tokens(name: str, rows: int, columns: int) -> list[int]:
    if name != "mistral3":
        return [IMAGE_TOKEN] * (rows * columns)
    each = [*[IMAGE_TOKEN] * columns, IMAGE_BREAK]
    return (each * rows)[:-1]


def words(count: int, seed: int) -> list[int]:
    return [max(token, 20) for token in random_tokens(count, seed=seed)]


def example(name: str, sizes: Sequence[tuple[int, int]] = ((ROWS, COLUMNS), (2, 2)), seed: int = 3) -> Example:
    tokens, images, pixels = words(20, seed), [], []
    for number, (rows, columns) in enumerate(sizes):
        placed = image_tokens(name, rows, columns)
        given = image_pixels(name, rows, columns, seed + number)
        pixels.append(scaled(name, given))
        tokens.append(IMAGE_START)
        data, mrope = given.numpy().tobytes(), name != "mistral3"
        images.append(
            ImageInput(
                str(seed), len(tokens), len(placed), rows, columns, mrope, data, tuple(given.shape), SCALE, SHIFT
            )
        )
        tokens += [*placed, IMAGE_END, *words(9, seed + number)]
    if name == "mistral3":
        high, wide = (max(each.shape[axis] for each in pixels) for axis in (2, 3))
        padded = [torch.nn.functional.pad(each, (0, wide - each.shape[3], 0, high - each.shape[2])) for each in pixels]
        edges = [[each.shape[2], each.shape[3]] for each in pixels]
        return Example(tokens, tuple(images), {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor(edges)})
    grids = torch.tensor([[1, rows * MERGE, columns * MERGE] for rows, columns in sizes])
    return Example(tokens, tuple(images), {"pixel_values": torch.cat(pixels), "image_grid_thw": grids})


def expected(model: Any, given: Example, steps: int = STEPS) -> tuple[list[int], Tensor]:
    """Greedy tokens of transformers, and float32 log-probabilities [steps, vocabulary]."""
    ids = torch.tensor([given.tokens])
    types = {"mm_token_type_ids": (ids == IMAGE_TOKEN).long()} if "image_grid_thw" in given.inputs else {}
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
            **given.inputs,
            **types,
        )
    logits = torch.stack([step[0].float() for step in found.logits])
    return found.sequences[0, len(given.tokens) :].tolist(), logits.log_softmax(-1)


def rows_of(prompt: Prompt, images: tuple[ImageInput, ...], cuts: Sequence[int]) -> list[PlanRow]:
    """Chunks between these positions, as the scheduler plans them."""
    rows = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        rotary = rotary_positions(images, start, end - start)
        rows.append(prompt.row(start, end - start, images=() if number else images, rotary=rotary))
    return rows


def decoded(runners: list[ModelRunner], given: Example, tokens: list[int], cuts: Sequence[int]) -> Tensor:
    """Log-probabilities after the prompt and after each token, in chunks beside a request of text."""
    whole = [*given.tokens, *tokens]
    pages = [3, 1, 9, 5, 12, 7, 14]
    rows = rows_of(Prompt(1, given.tokens, pages, PAGE), given.images, cuts)
    for at in range(len(given.tokens), len(whole) - 1):
        rotary = rotary_positions(given.images, at, 1)
        rows.append(
            PlanRow(1, at, 1, packed.pack(pages), packed.pack(whole[at : at + 1]), sample=GREEDY, rotary=rotary)
        )
    text = [*words(30, 9), IMAGE_TOKEN, *words(40, 8)]  # with an id that means nothing there
    other = Prompt(2, text, [2, 4, 6, 8, 10, 11], PAGE)
    found = []
    for number, row in enumerate(rows):
        beside = [other.row(number * 8, 8)] if number < 8 else []
        hidden = None
        for runner in runners:
            hidden = runner.forward([*beside, row], hidden)
        assert hidden is not None
        samples = {each.request: each for each in runners[-1].sample([*beside, row], hidden).result().samples}
        if 1 in samples:
            found.append(reported_logprobs(samples[1]))
    return torch.stack(found)


CUTS = ("whole", "beside", "within", "singly")


def cuts_of(given: Example, kind: str) -> list[int]:
    first, second, length = *given.images, len(given.tokens)
    return {
        "whole": [0, length],
        "beside": [0, first.start, first.end, second.end, length],
        "within": [0, first.start + 4, first.start + 9, second.start + 1, length],
        "singly": [0, first.start - 1, *range(first.start, first.end + 1), second.start + 2, length],
    }[kind]


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("name", NAMES)
def test_images_are_computed_as_transformers_does(kept: Callable[[str], Saved], name: str, kind: str) -> None:
    folder, model = kept(name)
    given = example(name)
    tokens, logprobs = expected(model, given)
    found = decoded([make_runner(folder, decoder="library")], given, tokens, cuts_of(given, kind))
    torch.testing.assert_close(found, logprobs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_compute_the_same(kept: Callable[[str], Saved], name: str) -> None:
    folder, model = kept(name)
    given = example(name)
    tokens, logprobs = expected(model, given)
    runners = [make_runner(folder, decoder="library", layers=layers) for layers in (range(2), range(2, 4))]
    found = decoded(runners, given, tokens, cuts_of(given, "within"))
    torch.testing.assert_close(found, logprobs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_another_image_gives_another_answer(kept: Callable[[str], Saved], name: str) -> None:
    """The control: what the tests above compare depends on the pixels."""
    folder, model = kept(name)
    given, other = example(name), example(name, seed=5)
    tokens, logprobs = expected(model, given)
    swapped = given._replace(images=other.images)
    found = decoded([make_runner(folder, decoder="library")], swapped, tokens, cuts_of(given, "whole"))
    assert (found - logprobs).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_rotary_positions_are_those_of_transformers(kept: Callable[[str], Saved], name: str) -> None:
    model = kept(name).model.model
    for sizes in ([(1, 1)], [(3, 5), (2, 2)], [(7, 2), (1, 9), (4, 4)]):
        given = example(name, sizes)
        ids = torch.tensor([given.tokens])
        positions, delta = model.get_rope_index(
            ids, (ids == IMAGE_TOKEN).long(), image_grid_thw=given.inputs["image_grid_thw"]
        )
        length = len(given.tokens)
        assert next_position(given.images, length) == length + int(delta)
        for start in range(0, length, 7):
            count = min(11, length - start)
            found = rotary_positions(given.images, start, count)
            wanted = positions[:, 0, start : start + count]
            expected_bytes = packed.pack(wanted.flatten().tolist())
            plain = packed.pack(list(range(start, start + count)) * 3)
            assert (found or plain) == expected_bytes
        behind = packed.unpack(rotary_positions(given.images, length, 2)).tolist()
        assert behind == [length + int(delta), length + int(delta) + 1] * 3


@pytest.mark.parametrize("name", [*NAMES, "gemma3-vision"])
def test_the_first_stage_has_the_encoder_of_images_that_are_served(kept: Callable[[str], Saved], name: str) -> None:
    """And what the plan of memory says is what a stage holds."""
    source = resolve_source(str(kept(name).folder))
    spec = library_spec(source)
    middle = spec.layers // 2
    for layers in (range(middle), range(middle, spec.layers)):
        part = part_of(spec, layers)
        checkpoint = SafetensorsCheckpoint(source.path)
        model = load_model(source, checkpoint, layers, torch.float32, LoadProgress(), part.shard)
        assert len(encoders(model)) == (name in NAMES and not layers.start)
        assert weight_count(part) == sum(each.numel() for each in model.parameters())
