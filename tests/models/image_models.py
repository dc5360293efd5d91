"""Models of the zoo that take images, as a server gets them: tokenizer, chat template, processor; and questions."""

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoImageProcessor

from headrace.engine.model.stub import stub_tokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import make_model

WORDS, VOCABULARY = 296, 300
START, IMAGE, END, BREAK = range(WORDS, VOCABULARY)
NAMES = ("qwen3-vl", "qwen2.5-vl", "mistral3")
EDGE = 28
MARGIN = 0.05  # of the best token before the second one: no rounding makes another one of it
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": EDGE**2, "longest_edge": 20 * EDGE**2},
}  # fmt: skip
_PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "patch_size": EDGE, "size": {"longest_edge": 4 * EDGE}}


class Question(NamedTuple):
    """A conversation of one message, and what transformers answers."""

    parts: tuple[str | bytes, ...]
    """Texts, and image files."""
    ids: list[int]
    """All token ids of the prompt."""
    tokens: list[int]
    """Greedy ones of the answer."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part_of(each) for each in self.parts]}]


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{b64encode(file).decode()}"


def part_of(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part)}}


def picture(seed: int, width: int = 90, height: int = 60, form: str = "PNG") -> bytes:
    """A file of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 255, (6, 9, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


def marks(name: str) -> dict[int, str]:
    """Special tokens of a model, by their ids."""
    if name == "mistral3":
        return {START: "<start>", IMAGE: "[IMG]", END: "[IMG_END]", BREAK: "[IMG_BREAK]"}
    return {START: "<|vision_start|>", IMAGE: "<|image_pad|>", END: "<|vision_end|>", BREAK: "<break>"}


def make_image_model(name: str, folder: Path) -> Any:
    """A random model in a folder with all that a server needs."""
    architecture = ARCHITECTURES[name]
    ids = {"image_token_id": IMAGE}
    if name != "mistral3":
        ids |= {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": BREAK}
    architecture = architecture._replace(fields={**architecture.fields, **ids})
    model = make_model(architecture, vocab_size=VOCABULARY, eos_token_id=None, bos_token_id=None)
    model.save_pretrained(folder)
    write_texts(name, folder)
    return model


def write_texts(name: str, folder: Path) -> None:
    """What a folder has beside configuration and weights."""
    tokenizer = stub_tokenizer(f"stub:vocab={WORDS}")
    special = marks(name)
    assert tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()]) == len(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    shown = special[IMAGE] if name == "mistral3" else special[START] + special[IMAGE] + special[END]
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}" + shown + "{% else %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(_PIXTRAL if name == "mistral3" else _QWEN))


class Oracle:
    """Answers of transformers: its processor, its model, and tokens put together by hand."""

    def __init__(self, name: str, folder: Path, model: Any) -> None:
        self.name = name
        self.model = model
        self.tokenizer: Tokenizer = load_tokenizer(str(folder), "")
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def ask(self, *parts: str | bytes, tokens: int) -> Question | None:
        """What transformers answers; None where rounding could change it."""
        ids: list[int] = []
        found = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part)
                continue
            image = Image.open(BytesIO(part))
            processed = self._processor(images=[image], return_tensors="pt")
            found.append(processed)
            if self.name == "mistral3":
                high, wide = (edge // EDGE for edge in processed["image_sizes"][0])
                rows = ([*[IMAGE] * int(wide), BREAK] * int(high))[:-1]
                ids += [*rows, END]
            else:
                ids += [START, *[IMAGE] * (int(processed["image_grid_thw"].prod()) // 4), END]
        prompt = torch.tensor([ids])
        inputs = {} if not found else _joined(self.name, found)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (prompt == IMAGE).long()
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
                **inputs,
            )  # fmt: skip
        best = torch.stack([step[0].float() for step in output.logits]).topk(2).values
        said = output.sequences[0, len(ids) :].tolist()
        clear = bool((best[:, 0] - best[:, 1] > MARGIN).all()) and max(said) < WORDS
        return Question(parts, ids, said) if clear else None

    def clear(self, *texts: str, tokens: int, seed: int = 0) -> Question:
        """The first clear question with a picture between any two of these texts."""
        for number in range(seed, seed + 50):
            pictures = [picture(1000 * number + index) for index in range(len(texts) - 1)]
            parts: list[str | bytes] = [texts[0]]
            for file, text in zip(pictures, texts[1:], strict=True):
                parts += [file, text]
            if (found := self.ask(*(part for part in parts if part), tokens=tokens)) is not None:
                return found
        raise AssertionError("no clear answer")


def _joined(name: str, found: list[Any]) -> dict[str, torch.Tensor]:
    if name != "mistral3":
        return {key: torch.cat([each[key] for each in found]) for key in ("pixel_values", "image_grid_thw")}
    pixels = [each["pixel_values"] for each in found]
    high, wide = (max(each.shape[axis] for each in pixels) for axis in (2, 3))
    padded = [torch.nn.functional.pad(each, (0, wide - each.shape[3], 0, high - each.shape[2])) for each in pixels]
    return {
        "pixel_values": torch.cat(padded),
        "image_sizes": torch.cat([torch.as_tensor(each["image_sizes"]) for each in found]),
    }
