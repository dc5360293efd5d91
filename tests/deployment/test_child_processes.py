"""No child process of the program shares the terminal's input: nothing can ask there, and nothing can answer."""

import ast
from collections.abc import Iterator

from tests.deployment.files import PACKAGES, ROOT

STARTING = ("Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec", "create_subprocess_shell")


def starts() -> Iterator[tuple[str, ast.Call]]:
    """Calls that start a process, with where they stand."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                name = ast.unparse(node.func)
                if node.func.attr in STARTING and "subprocess" in name:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_child_process_is_given_its_input() -> None:
    found = dict(starts())
    assert len(found) >= 5
    inheriting = [where for where, call in found.items() if not any(each.arg == "stdin" for each in call.keywords)]
    assert not inheriting
