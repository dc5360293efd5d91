"""Specifications of models that transformers' modules compute, kept: they are found by a pass of these modules."""

import sys

from headrace.engine.model.config import ModelSpec
from headrace.engine.model.kept_records import KeptRecords
from headrace.engine.model.source import ModelSource, resolve_source

RECORDS = KeptRecords(
    folder="models",
    version=5,
    module="headrace.engine.library.spec_store",
    type=ModelSpec,
    what="the specification",
    libraries=("transformers", "torch"),
)


def kept_spec(source: ModelSource, cache_dir: str) -> ModelSpec:
    """See library_spec(): made in a child process if it is not in cache_dir ("" for no cache), and in this one where
    transformers is imported already."""
    if "transformers" in sys.modules:
        from headrace.engine.library.spec import library_spec

        return library_spec(source)
    return RECORDS.load(source, cache_dir)


def main(parent: str, model: str, path: str) -> int:
    """Make one specification; returns the exit status."""
    from headrace.engine.library.spec import library_spec  # imports transformers

    return RECORDS.make(parent, path, lambda: library_spec(resolve_source(model)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
