"""The flags of `headrace bake`: those of the model as `headrace serve` has them, and what is to be made of what."""

import argparse

from headrace.core.config.flag import MODEL
from headrace.server.config.flags import add_flag
from headrace.server.config.settings import SETTINGS, Setting

DESCRIPTION = "compute the KV cache of a prompt's beginning once, into a file that servers take with --kv-library"
USAGE = (
    "headrace bake PROMPT.txt -o FILE.kv [--model ...]\n"
    "       headrace bake --token-ids IDS.json | --messages CHAT.json -o FILE.kv [--model ...]\n"
    "       headrace bake --show FILE.kv | --verify FILE.kv | --index FOLDER"
)
_OTHERS = ("page-size", "kv-pages", "chunk-tokens", "cache-dir", "chat-template")
_NOT_HERE = ("lora", "served-model-name", "tool-parser", "reasoning-parser")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags. A setting that is not given leaves no attribute in the namespace."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT.txt", help="text of the prefix, UTF-8; - reads it")
    parser.add_argument("--token-ids", metavar="IDS.json", help="its token ids, a JSON list, in the place of a text")
    parser.add_argument(
        "--messages",
        metavar="CHAT.json",
        help="the first messages of a chat, a JSON list, in the model's chat template, without the place where the "
        "assistant's answer begins",
    )
    parser.add_argument("-o", "--output", metavar="FILE.kv", help="the KV file to write")
    parser.add_argument("--show", metavar="FILE.kv", help="print what a KV file holds, as JSON")
    parser.add_argument("--verify", metavar="FILE.kv", help="read a KV file to its end and check all of it")
    parser.add_argument("--index", metavar="FOLDER", help="write index.json, which HTTP stores need, into a folder")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings of the model")
    section = parser.add_argument_group("model")
    for setting in _settings():
        add_flag(section, setting)


def _settings() -> list[Setting]:
    return [
        setting
        for setting in SETTINGS
        if setting.key in _OTHERS or (setting.flag.group == MODEL and setting.key not in _NOT_HERE)
    ]
