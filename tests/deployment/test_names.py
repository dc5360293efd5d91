"""A name of the product means one thing: few public classes share theirs with another."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.deployment.files import PACKAGES, ROOT

MOST_TWICE = 12
# Private names of threading.Thread from Python 3.11 to 3.14: a subclass that has one of them is no thread any more.
OF_THREADS = frozenset(
    [
        "_after_fork",
        "_args",
        "_bootstrap",
        "_bootstrap_inner",
        "_context",
        "_daemonic",
        "_delete",
        "_handle",
        "_ident",
        "_initialized",
        "_invoke_excepthook",
        "_is_stopped",
        "_kwargs",
        "_name",
        "_native_id",
        "_os_thread_handle",
        "_reset_internal_locks",
        "_set_ident",
        "_set_native_id",
        "_set_tstate_lock",
        "_started",
        "_stderr",
        "_stop",
        "_target",
        "_tstate_lock",
        "_wait_for_tstate_lock",
    ]
)


def public_classes() -> dict[str, list[Path]]:
    """The files that define each class at the top of a module."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT))
    return found


def test_few_classes_share_their_name() -> None:
    twice = {name: sorted(map(str, paths)) for name, paths in public_classes().items() if len(paths) > 1}
    assert len(twice) <= MOST_TWICE, f"give the new one a name of its own: {twice}"


def test_threads_keep_the_names_that_are_pythons() -> None:
    """Whatever Python runs them: some of these names are in one version only."""
    checked = 0
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Thread" in ast.unparse(base) for base in node.bases):
                checked += 1
                assert not OF_THREADS & set(_own_names(node)), f"{path.relative_to(ROOT)}: {node.name}"
    assert checked >= 7


def _own_names(node: ast.ClassDef) -> Iterator[str]:
    """Methods of a class, and attributes that it sets."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr
