"""Command-line arguments that several benchmarks have."""

import argparse

DTYPES = ("float32", "bfloat16")
Group = argparse._ActionsContainer  # a parser or a group of its arguments


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description with its line breaks."""


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.NAME`. description: the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description, formatter_class=_HelpFormatter
    )


def add_model(parser: Group, dtype: str = "float32") -> None:
    """--model and --dtype, as of `headrace serve`."""
    parser.add_argument("--model", default="smollm2", help="smollm2, a Hugging Face folder or hub id, a .gguf file")
    add_dtype(parser, dtype)


def add_dtype(parser: Group, dtype: str = "float32") -> None:
    """--dtype of the weights and the KV."""
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="dtype of weights and KV")


def add_threads(parser: Group) -> None:
    """--threads that each engine computes with."""
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads that each engine computes with")


def add_rounds(parser: Group, rounds: int) -> None:
    """--rounds to take the median of."""
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="measurements to take the median of")


def add_lengths(parser: Group, *lengths: int) -> None:
    """--lengths of prompts."""
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(lengths), metavar="TOKENS", help="tokens of the prompts"
    )
