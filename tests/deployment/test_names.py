"""A name of the product means one thing: few public classes share theirs with another."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.deployment.files import PACKAGES, ROOT

MOST_TWICE = 12


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
