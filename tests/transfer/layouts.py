"""Ways to lay out a pool, at random."""

from random import Random

from headrace.core.types.kv.backends import Placement, PoolLayout
from headrace.core.types.kv.geometry import KV, Component, Geometry


def random_layout(geometry: Geometry, pages: int, random: Random, step: int = 1) -> PoolLayout:
    """The axes of every tensor nested in any order, with gaps of multiples of step bytes between and before them;
    sometimes the tensors one after the other, sometimes side by side in every page. bytes: as many as that needs, and
    no more."""
    places: dict[str, Placement] = {KV: Placement(name=KV, offset=0, strides=(0, 0, 0, 0, 0))}
    within_pages = random.random() < 0.4
    at = 0
    for tensor in geometry.tensors:
        offset = -(-at // step) * step + random.choice((0, 0, random.randrange(40))) * step
        strides, at = _nested(tensor, 1 if within_pages else pages, geometry.page_size, offset, random, step)
        places[tensor.name] = Placement(name=tensor.name, offset=offset, strides=strides)
    if within_pages:
        page = -(-at // step) * step + random.choice((0, random.randrange(40))) * step
        for name, place in places.items():
            places[name] = Placement(name=name, offset=place.offset, strides=(page, *place.strides[1:]))
    ends = [_end(tensor, places[tensor.name], pages, geometry.page_size) for tensor in geometry.tensors]
    kv = places.pop(KV)
    components = list(places.values())
    random.shuffle(components)
    return PoolLayout(bytes=max(ends), pages=pages, strides=kv.strides, offset=kv.offset, components=tuple(components))


def _nested(
    tensor: Component, pages: int, slots: int, offset: int, random: Random, step: int
) -> tuple[tuple[int, int, int, int, int], int]:
    """Strides of a tensor at an offset, and where what follows it may begin."""
    lengths = (pages, tensor.layers, tensor.planes, tensor.kv_heads, slots)
    strides, size = [0] * 5, tensor.slot_bytes
    for axis in random.sample(range(5), 5):
        strides[axis] = size + random.choice((0, 0, random.randrange(9))) * step
        size = strides[axis] * lengths[axis]
    return (strides[0], strides[1], strides[2], strides[3], strides[4]), offset + size


def _end(tensor: Component, place: Placement, pages: int, slots: int) -> int:
    lengths = (pages, tensor.layers, tensor.planes, tensor.kv_heads, slots)
    last = sum((n - 1) * stride for n, stride in zip(lengths, place.strides, strict=True))
    return place.offset + last + tensor.slot_bytes
