"""`headrace bake`: reads the prompt, computes it as a stage does, writes the pages."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import Config
from headrace.core.messages.orders import PlanRow
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.output import say
from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.core.types.kv.geometry import whole_tensors
from headrace.core.types.kv.kv_files import SUFFIX, KvFileHeader
from headrace.core.types.kv.kv_tiers import LIBRARY_PAGES
from headrace.core.types.kv.page_digests import text_digests
from headrace.core.types.packed import pack
from headrace.server.config.load import load
from headrace.text.chat_template import TemplateUse
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.tools.bake.kv_file import describe, verify, write_index, write_kv_file
from headrace.tools.output import ProgressLine, check_output

REQUEST = 0
PROGRESS_S = 0.2
INPUTS = ("prompt", "token_ids", "messages")
MODES = ("show", "verify", "index")


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the command. Raises ConfigError for a wrong flag, a file that cannot be read, and a damaged KV file."""
    modes = [mode for mode in MODES if getattr(given, mode)]
    inputs = [name for name in INPUTS if getattr(given, name)]
    if len(modes) + len(inputs) != 1:
        raise ConfigError(
            "give one of: a text file, --token-ids FILE, --messages FILE, --show FILE, --verify FILE, --index FOLDER"
        )
    line = ProgressLine(sys.stderr, SystemClock(), PROGRESS_S)
    try:
        if not modes:
            return _bake(given, environ, line)
        path = Path(getattr(given, modes[0]))
        if given.show:
            say(msgspec.json.format(msgspec.json.encode(describe(path)), indent=2).decode())
        elif given.verify:
            header = verify(path, lambda done, pages: line.show(f"{done} of {pages} pages"))
            say(f"{path}: {header.pages} pages of {header.page_size} tokens are as they were written")
        else:
            say(f"{path}: index.json lists {len(write_index(path).files)} KV files")
        return 0
    finally:
        line.close()


def _bake(given: argparse.Namespace, environ: Mapping[str, str], line: ProgressLine) -> int:
    if not given.output:
        raise ConfigError(f"-o is missing: name the file to write, such as -o handbook{SUFFIX}")
    output = check_output("-o", given.output, SUFFIX)
    assert output is not None, "it is given"
    flags = {key: value for key, value in vars(given).items() if key not in (*INPUTS, *MODES, "output", "command")}
    config = load(flags, environ)
    tokens = read_tokens(given, config)
    size = config.engine.page_size
    pages = len(tokens) // size
    if not 1 <= pages <= LIBRARY_PAGES:
        raise ConfigError(f"the prompt has {len(tokens)} tokens, {pages} whole pages of --page-size {size}: 1 to "
                          f"{LIBRARY_PAGES} can be in a file")  # fmt: skip
    from headrace.server.config.resolve import resolve  # torch takes seconds to load

    resolved = resolve(config).config
    if resolved.engine.kv_pages < pages:
        raise ConfigError(f"the prompt takes {pages} KV pages and the pool has {resolved.engine.kv_pages}: write "
                          f"--kv-pages {pages} or more")  # fmt: skip
    if resolved.model.max_model_len < pages * size:
        raise ConfigError(f"the prompt has {len(tokens)} tokens and the model takes {resolved.model.max_model_len}")
    header, bodies = compute(resolved, tokens[: pages * size], lambda done: line.show(f"{done} tokens computed"))
    written = write_kv_file(output, header, bodies)
    rest = len(tokens) - pages * size
    left = f"; the last {rest} tokens fill no page and are left out" if rest else ""
    say(f"{output}: {pages * size} tokens in {pages} pages, {written / 1e6:.1f} MB{left}")
    return 0


def read_tokens(given: argparse.Namespace, config: Config) -> list[int]:
    """The token ids of what is given. Raises ConfigError."""
    if given.token_ids:
        found = _json("--token-ids", given.token_ids, list[int])
        if any(not 0 <= token < 1 << 31 for token in found):
            raise ConfigError(f"--token-ids {given.token_ids}: token ids are 0 or more")
        return list(found)
    tokenizer: Tokenizer = load_tokenizer(config.model.model, config.server.cache_dir, config.server.chat_template)
    try:
        if given.messages:
            messages = _json("--messages", given.messages, list[dict[str, Any]])
            return tokenizer.encode_chat(messages, use=TemplateUse(opens=False))
        return tokenizer.encode(_text(given.prompt))
    except HeadraceError as error:
        raise ConfigError(f"{given.messages or given.prompt}: {error.info.message}") from error


def compute(
    config: Config, tokens: Sequence[int], progress: Callable[[int], None]
) -> tuple[KvFileHeader, list[list[Any]]]:
    """Compute a prompt of whole pages in one process, as a stage with all layers and heads does. config: resolved.

    Returns the header, and the parts of each page. progress: of computed tokens. Raises ConfigError for a model without
    pages alone, and for KV that is not finite.
    """
    import torch

    from headrace.engine.device import computation_of
    from headrace.engine.kv.tiers.pages import pool_pages
    from headrace.engine.load_plan import plan_rank
    from headrace.engine.runner import ModelRunner

    runner = ModelRunner(plan_rank(config.model, config.engine))
    geometry, pages = runner.geometry, len(tokens) // config.engine.page_size
    if geometry.state_bytes:
        raise ConfigError(f"--model {config.model.model}: it keeps states beside its pages, which no KV file holds")
    if max(tokens) >= runner.vocab_size:
        raise ConfigError(f"token id {max(tokens)} is none of the model, which has {runner.vocab_size}")
    runner.warm_up()
    for start in range(0, len(tokens), config.engine.pass_tokens):
        chunk = tokens[start : start + config.engine.pass_tokens]
        held = pack(range(geometry.pages_for(start + len(chunk))))
        runner.forward([PlanRow(REQUEST, start, len(chunk), held, pack(chunk))])
        progress(start + len(chunk))
    for name, tensor in runner.pool.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor[:pages]).all()):
            raise ConfigError(f"--model {config.model.model}: the KV of this prompt is not finite (tensor {name})")
    names = [part.name for part in geometry.tensors]
    order = sorted(range(len(names)), key=names.__getitem__)
    bodies = [[parts[at].copy() for at in order] for parts in pool_pages(runner.pool).read(range(pages))]
    packed = pack(tokens)
    header = KvFileHeader(
        model=config.model_name,
        fingerprint=runner.fingerprint,
        page_size=geometry.page_size,
        tensors=whole_tensors([geometry]),
        tokens=packed,
        digests=b"".join(text_digests(packed, geometry.page_size)),
        checksums=b"".join(map(_checksum, bodies)),
        computation=computation_of(config.model, config.engine),
    )
    return header, bodies


def _checksum(parts: Sequence[Any]) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(part.data)
    return digest.digest()


def _text(path: str) -> str:
    """Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not UTF-8, from byte {error.start} on") from error


def _json(option: str, path: str, kind: Any) -> Any:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
