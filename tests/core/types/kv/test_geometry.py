"""Shapes of KV pools."""

from headrace.core.types.kv.geometry import CacheShape, Component, Geometry, cache_shape


def test_the_shape_of_a_whole_models_cache_is_that_of_all_its_ranks() -> None:
    ranks = [Geometry("float16", 3, 2, 8, 16, start, head) for start in (0, 3) for head in (0, 2)]
    assert cache_shape(ranks) == CacheShape("float16", 6, 4, 8)
    latent = Geometry("float16", 0, 0, 0, 16, components=(Component("latent", "float16", 2, 1, 64, planes=1),))
    assert cache_shape([*ranks, latent]) is None
    assert cache_shape([]) is None
