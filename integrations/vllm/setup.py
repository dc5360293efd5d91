"""Builds headrace_vllm out of a checkout: the connector, and copies of the modules of Headrace that it uses.

The copies live inside the package, so that nothing else in vLLM's environment can be named like them. Imports of them
are rewritten; they stand at the beginnings of lines, in full, which is how this repository writes imports.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
NAME = "headrace_vllm"
PARTS = {  # package here: package there
    "headrace.integrations.vllm": NAME,
    "headrace.integrations.peer": f"{NAME}.peer",
    "core": f"{NAME}.core",
    "transfer": f"{NAME}.transfer",
    "headrace.transfer.backends": f"{NAME}.transfer.backends",
    "headrace.engine.model": f"{NAME}.engine.model",
    "engine": f"{NAME}.engine",
}
MODEL = ("checkpoint", "config", "fingerprint", "gguf_file", "rope", "source", "standin")
ONLY = {  # of packages that are not copied whole
    "engine": ("__init__.py",),
    "headrace.engine.model": ("__init__.py", *(f"{name}.py" for name in MODEL)),
}
NOT = {"setup.py", "nixl.py"}  # the latter writes from a pool that the connector has not got, and needs a package more
IMPORT = re.compile(rf"^( *(?:from|import) )({'|'.join(map(re.escape, PARTS))})(?=[. \n])", re.MULTILINE)


def package(folder: Path) -> None:
    """Write the package into this folder."""
    for here, there in PARTS.items():
        source, target = ROOT / here.replace(".", "/"), folder / there.replace(".", "/")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.glob("*.py")):
            if path.name not in NOT and path.name in ONLY.get(here, (path.name,)):
                text = IMPORT.sub(lambda match: match[1] + PARTS[match[2]], path.read_text(encoding="utf-8"))
                (target / path.name).write_text(text, encoding="utf-8")


class Build(build_py):  # type: ignore[misc]
    def run(self) -> None:
        package(Path(self.build_lib))


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:  # not the checkout, where other tools would take it for source
        options = {"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}}
        setup(cmdclass={"build_py": Build}, packages=[NAME], package_dir={NAME: "."}, options=options)
