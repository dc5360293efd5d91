"""Makes models of the zoo, and computes them with transformers."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.core.messages.orders import PlanRow
from headrace.engine.model.stub import stub_tokenizer
from headrace.engine.runner import ModelRunner
from tests.e2e import expert_models
from tests.engine.models import reported_logprobs
from tests.models.architectures import ARCHITECTURES, Architecture

SPREAD = 0.2  # of norms and biases, which a new model has equal


class Reference(NamedTuple):
    """What transformers makes of a prompt."""

    tokens: list[int]
    """Greedy ones."""
    logprobs: Tensor
    """float32 [tokens, vocabulary], of each of them."""


def make_model(architecture: Architecture, **others: Any) -> Any:
    """A random model in float32 whose vectors are random, too. others: fields of its text in place of those."""
    torch.manual_seed(0)
    fields = {**architecture.fields, **others}
    if "text_config" in fields:
        fields = {**architecture.fields, "text_config": {**fields["text_config"], **others}}
    config = AutoConfig.for_model(architecture.model_type, **fields)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except ValueError:  # a wrapper of several inputs
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        name, *_ = [name for name in dir(module) if name.endswith(("ForCausalLM", "ForConditionalGeneration"))]
        model = getattr(module, name)._from_config(config, attn_implementation="eager")
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() < 2 and not name.endswith(("A_log", "dt_bias", ".D")):
            parameter.data += torch.randn_like(parameter) * SPREAD
        elif "router" in name or name.endswith("gate.weight"):
            parameter.data = torch.randn_like(parameter)
        elif parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) * 2 / parameter.shape[-1] ** 0.5
    return model.eval()


def save_plainly(folder: Path, model: Any) -> None:
    """As transformers does."""
    model.save_pretrained(folder)


def save_for_servers(name: str, folder: Path, save: Callable[[Path, Any], None] = save_plainly, **others: Any) -> Any:
    """Save a random model of the zoo that never ends a text, and a tokenizer of bytes; returns the model. others: as of
    make_model()."""
    architecture = ARCHITECTURES[name]
    text = architecture.fields.get("text_config", architecture.fields)
    vocabularies = {field for field in ("vocab_size", "vocab_size_per_layer_input") if field in text}
    sizes = dict.fromkeys(vocabularies, expert_models.VOCABULARY)
    model = make_model(architecture, **sizes, **others, eos_token_id=None, bos_token_id=None)
    with torch.no_grad():
        save(folder, model)
    stub_tokenizer(f"stub:vocab={expert_models.VOCABULARY}").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return model


class Saved(NamedTuple):
    """A model of the zoo and its folder."""

    folder: Path
    model: Any


def saver(temporary: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Makes each model of the zoo once."""

    @cache
    def make(name: str) -> Saved:
        saved = Saved(temporary.mktemp(name), make_model(ARCHITECTURES[name]))
        saved.model.save_pretrained(saved.folder)
        return saved

    return make


class Kept(NamedTuple):
    """A model in a folder, and what transformers makes of a prompt."""

    folder: Path
    expected: Reference


def keeper(temporary: pytest.TempPathFactory, prompt: Sequence[int], steps: int) -> Callable[[str], Kept]:
    """Makes each model of the zoo once, and what transformers computes with it: see reference()."""
    saved = saver(temporary)

    @cache
    def make(name: str) -> Kept:
        folder, model = saved(name)
        return Kept(folder, reference(model, prompt, steps))

    return make


def passed(runners: Sequence[ModelRunner], batches: Iterable[Sequence[PlanRow]]) -> Tensor:
    """Log-probabilities that passes through a pipeline report of request 1: [samples, vocabulary]; empty on a shard
    that samples nothing."""
    found = []
    for rows in batches:
        hidden = None
        for runner in runners:
            hidden = runner.forward(rows, hidden)
        assert hidden is not None
        samples = {each.request: each for each in runners[-1].sample(rows, hidden).result().samples}
        if 1 in samples:
            found.append(reported_logprobs(samples[1]))
    return torch.stack(found) if found else torch.empty(0)


def reference(model: Any, prompt: Sequence[int], steps: int) -> Reference:
    """Greedy tokens of transformers, whole prompt first and then one by one."""
    tokens: list[int] = []
    found = []
    for _ in range(steps):
        found.append(_logprobs_behind(model, [*prompt, *tokens]))
        tokens.append(int(found[-1].argmax()))
    return Reference(tokens, torch.stack(found))


def repeated(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of transformers where others' tokens follow: as of reference()."""
    return torch.stack([_logprobs_behind(model, [*prompt, *tokens[:count]]) for count in range(len(tokens))])


def _logprobs_behind(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float(), -1)
