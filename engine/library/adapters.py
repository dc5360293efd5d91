"""LoRA adapters of transformers' modules: their weights beside those of the linear layers that they name."""

from collections.abc import Callable, Sequence

from torch import nn

from headrace.engine.dtypes import Precision
from headrace.engine.library.model import layer_list
from headrace.engine.library.modules import Adaptable, AdaptedRows
from headrace.engine.model.arithmetic import Weight
from headrace.engine.model.lora import LoraAdapter, check_sizes, layer_of
from headrace.engine.model.weights import Delta, make_delta


def adapt(
    model: nn.Module,
    adapters: Sequence[LoraAdapter],
    layers: range,
    pack: Callable[[Weight], Weight],
    precision: Precision,
    device: str,
) -> AdaptedRows:
    """Read the weights of these layers, and have the model's linear layers add what they say. Returns what says which
    rows those are. Raises ConfigError for a module that is no linear layer of the model, or of another size."""
    rows, count = AdaptedRows(), len(layer_list(model))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Adaptable)}
    deltas: dict[str, dict[str, list[Delta]]] = {}
    for adapter in adapters:
        for name, module in adapter.modules.items():
            layer = layer_of(name)
            if layer is not None and layer < count and layer not in layers:
                continue  # of another stage
            linear = linears.get(name)
            if linear is None or layer is None or ".experts." in name:
                raise adapter.refuse(name, "is no linear layer within a layer of the model, or one of its experts")
            check_sizes(adapter, name, module, linear.whole_size)
            down, up = adapter.read(name)
            if (part := linear.part) is not None:
                own = slice(part.own.start, part.own.stop)
                down, up = (down, up[own]) if part.axis == 0 else (down[:, own], up)
            delta = make_delta(range(len(up)), (down, up), precision, device, pack)
            deltas.setdefault(name, {}).setdefault(adapter.fingerprint, []).append(delta)
    for name, added in deltas.items():
        linears[name].adapt(added, rows)
    return rows
