"""The documents name files, make targets, benchmarks and flags that exist."""

import argparse
import re
from collections.abc import Iterator

import pytest

from headrace.cli.commands import build_parser
from headrace.tools.bench import options as bench_options
from tests.deployment.files import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("integrations/*/*.md")]
    if path.name != "CHANGELOG.md"  # which also names what is gone
)
TOPS = (
    "core|scheduler|transfer|peer|engine|text|server|gateway|integrations|tools|testing|cli|benchmarks|tests|configs|docs|examples|"
    "requirements|src"
)
PATHS = re.compile(rf"`((?:{TOPS})/[\w./-]*)`")
LINKS = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_exist(name: str) -> None:
    missing = [path for path in PATHS.findall(text(name)) if not (ROOT / path).exists()]
    assert not missing, f"{name} names files that are not there: {missing}"
    folder = (ROOT / name).parent
    dangling = [link for link in LINKS.findall(text(name)) if not (folder / link).exists()]
    assert not dangling, f"{name} links to files that are not there: {dangling}"


def test_the_way_of_a_prompt_to_the_scheduler_is_eight_files_that_import_each_other() -> None:
    section = (
        text("docs/architecture.md").partition("A prompt's way from its route to `Submit`")[2].partition("\n\nA ")[0]
    )
    files = re.findall(r"^\d+\. `([\w/]+)\.py`", section, re.MULTILINE)
    assert 1 < len(files) <= 8
    for index, file in enumerate(files[1:], 1):
        module = re.compile(rf"^from headrace\.{file.replace('/', '.')} import ", re.MULTILINE)
        assert any(module.search(text(f"{before}.py")) for before in files[:index]), f"nothing before imports {file}"
    assert "return Submit(" in text(f"{files[-1]}.py")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_and_benchmarks_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text(name))) <= targets
    for module in re.findall(r"python -m (benchmarks(?:\.\w+)?)", text(name)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def flags() -> set[str]:
    """Every option of every sub-command of headrace."""
    bench_serve = argparse.ArgumentParser()
    bench_options.add_flags(bench_serve)
    return {option for parser in (build_parser(), bench_serve) for option in options(parser)}


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of a parser, and of the sub-commands below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_headrace_flags_exist(name: str) -> None:
    """In command lines that begin with headrace, up to the end of the line or of a continued one."""
    known = flags()
    joined = text(name).replace("\\\n", " ")
    for line in re.findall(
        r"headrace (?:serve|check|gateway|stage|keys|demo|simulate|replay|bench)\b([^`\n]*)", joined
    ):
        unknown = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", line.split("#")[0])) - known
        assert not unknown, f"{name}: {unknown} in: headrace ...{line}"
