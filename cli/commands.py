"""The command `headrace`: serve, up, gateway, dynamo, stage, check, bake, keys, demo, simulate, replay, bench."""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from headrace.core.config import Config, EngineConfig
from headrace.core.runtime.output import complain, prepare_output
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, MISTAKE
from headrace.core.runtime.signals import INTERRUPTED_BY
from headrace.core.types.errors import ConfigError
from headrace.core.version import headrace_version
from headrace.integrations.dynamo import options as dynamo_options
from headrace.server.cluster import options as cluster_options
from headrace.server.config import curve_keys
from headrace.server.config.flags import add_flags
from headrace.server.config.gateway import gateway_of, load_gateway
from headrace.server.config.load import CPUINFO_VARIABLE, load
from headrace.server.config.settings import GATEWAY_SETTINGS
from headrace.server.config.toml_file import to_toml
from headrace.server.config.values import nearest
from headrace.server.stage_group import rank_info
from headrace.tools.bake import options as bake_options
from headrace.tools.replay import options as replay_options
from headrace.tools.simulate import options as simulate_options

INTERRUPTED = INTERRUPTED_BY + signal.SIGINT
BROKEN_PIPE = INTERRUPTED_BY + signal.SIGPIPE
DESCRIPTION = "A standalone prefill server: computes prompts and hands the KV cache to decode servers."
SERVE = "run a server until SIGTERM or Ctrl-C, which lets open requests finish"
GATEWAY = (
    "hand KV of Headrace prefill servers to decode engines on which nothing of Headrace is installed: routers take the "
    "gateway for a prefill server of the engine's own"
)
STAGE = "run one pipeline stage of a server started with --stages external, under torchrun, srun or Kubernetes"
DEMO = "hand four prompts from a prefill to a decode server on this machine, and compare the texts with one server's"
BENCH = (
    "serve URL: send load to a running server and measure it (headrace bench serve --help); otherwise run benchmarks/, "
    "which needs a checkout of the repository"
)
CHECK = "print the resolved configuration and the memory it takes, open the model's files, and fail on mistakes"
MEMORY_GIB = "plan for GPUs, or a machine without, that have N GiB free each (default: what is free here)"
MOST_GIB = 1 << 20


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigError for the first argument that this parser does not know, with the nearest of its flags."""
        given, extra = super().parse_known_args(args, namespace)
        if extra:
            name = extra[0].partition("=")[0]
            known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            hint = nearest(name.lstrip("-"), known, "--")
            if "model" in known and not name.startswith("-"):  # as in vllm serve MODEL
                hint = f"; did you mean --model {name}?"
            self.error(f"unknown argument {name}{hint}")
        return given, extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: MISTAKE, with one line on stderr, for wrong flags, files or models."""
    prepare_output()
    given = sys.argv[1:] if arguments is None else list(arguments)
    mistake = CONFIGURATION_MISTAKE if given[:1] == ["stage"] else MISTAKE
    try:
        status = _up(given) if given[:1] == ["up"] else _run(_parse(given))
        sys.stdout.flush()
        return status
    except ConfigError as error:
        complain(error)
        return mistake
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "headrace":  # a bug
            raise
        extra, needs = _needed(missing, given)
        print(f"headrace: {missing} is not installed; {needs} needs: pip install 'headrace[{extra}]'", file=sys.stderr)
        return mistake
    except BrokenPipeError:  # `headrace check | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED


def _needed(missing: str, given: Sequence[str]) -> tuple[str, str]:
    """The extra that brings a package that is missing, and what needs it."""
    if given[:1] == ["dynamo"]:
        return "dynamo", "headrace dynamo"
    return ("ray", "headrace up") if missing == "ray" else ("server", "the server")


def _run(given: argparse.Namespace) -> int:
    match given.command:
        case "serve":
            return _serve(given)
        case "check":
            return _check(given)
        case "gateway":
            return _gateway(given)
        case "dynamo":
            from headrace.integrations.dynamo import command as dynamo_command  # needs Dynamo

            return dynamo_command.main(given)
        case "stage":
            from headrace.server.stage_group import stage  # torch takes seconds to load

            return stage.main(given, os.environ)
        case "keys":
            return curve_keys.main(given)
        case "demo":
            from headrace.cli import demo

            return demo.main(given, os.environ)
        case "bake":
            from headrace.tools.bake import command as bake_command

            return bake_command.main(given, os.environ)
        case "simulate":
            from headrace.tools.simulate import command  # a server does not need the simulator

            return command.main(given, os.environ)
        case "replay":
            from headrace.tools.replay import command as replay_command

            return replay_command.main(given)
        case "bench serve":
            from headrace.tools.bench import command as bench_command  # nor the client of a benchmark

            return bench_command.main(given, os.environ)
        case _:
            return _bench(given.benchmark, given.arguments)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    given: argparse.Namespace = build_parser().parse_args(arguments)
    if given.command == "bench" and given.benchmark == "serve":
        return _parse_bench_serve(given.arguments)
    return given


def _parse_bench_serve(arguments: Sequence[str]) -> argparse.Namespace:
    from headrace.tools.bench import options as bench_options  # needs the extra server

    about = bench_options.DESCRIPTION
    parser = _Parser(prog="headrace bench serve", description=about, usage=bench_options.USAGE, allow_abbrev=False)
    bench_options.add_flags(parser)
    given: argparse.Namespace = parser.parse_args(arguments)
    given.command = "bench serve"
    return given


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line, one sub-parser per command."""
    parser = _Parser(prog="headrace", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"headrace {headrace_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, text in (("serve", SERVE), ("check", CHECK)):
        # The groups below list the flags; in the usage line they would fill a screen.
        usage = f"headrace {command} [--config FILE] [flags]"
        made = commands.add_parser(command, help=text, description=text, usage=usage, allow_abbrev=False)
        if command == "check":
            made.add_argument("--memory-gib", type=_gib, default=0, metavar="N", help=MEMORY_GIB)
        add_flags(made)
    about = cluster_options.DESCRIPTION
    usage = "headrace up --ray ADDRESS [--config FILE] [flags of headrace serve]"
    up = commands.add_parser("up", help=about, description=about, usage=usage, allow_abbrev=False)
    cluster_options.add_flags(up)
    add_flags(up)
    usage = "headrace gateway --decode URL[=HOST:PORT] --prefill URL [flags]"
    gateway = commands.add_parser("gateway", help=GATEWAY, description=GATEWAY, usage=usage, allow_abbrev=False)
    add_flags(gateway, GATEWAY_SETTINGS)
    about, usage = dynamo_options.DESCRIPTION, dynamo_options.USAGE
    dynamo_options.add_flags(
        commands.add_parser("dynamo", help=about, description=about, usage=usage, allow_abbrev=False)
    )
    stage = commands.add_parser("stage", help=STAGE, description=STAGE, allow_abbrev=False)
    rank_info.add_flags(stage)
    curve_keys.add_flags(
        commands.add_parser("keys", help=curve_keys.DESCRIPTION, description=curve_keys.DESCRIPTION, allow_abbrev=False)
    )
    demo = commands.add_parser("demo", help=DEMO, description=DEMO, allow_abbrev=False)
    demo.add_argument("--model", default="smollm2", help="as in headrace serve (default: smollm2)")
    demo.add_argument("--dtype", default="auto", help="as in headrace serve (default: auto)")
    about, usage = bake_options.DESCRIPTION, bake_options.USAGE
    bake_options.add_flags(commands.add_parser("bake", help=about, description=about, usage=usage, allow_abbrev=False))
    about, usage = simulate_options.DESCRIPTION, "headrace simulate TRACE [flags]"
    simulate_options.add_flags(
        commands.add_parser("simulate", help=about, description=about, usage=usage, allow_abbrev=False)
    )
    about, usage = replay_options.DESCRIPTION, replay_options.USAGE
    replay_options.add_flags(
        commands.add_parser("replay", help=about, description=about, usage=usage, allow_abbrev=False)
    )
    bench = commands.add_parser("bench", help=BENCH, description=BENCH, allow_abbrev=False)
    bench.add_argument("benchmark", nargs="?", help="serve, or a module of benchmarks/ (default: all of them)")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the benchmark")
    return parser


def _serve(given: argparse.Namespace) -> int:
    from headrace.server.config.resolve import resolve
    from headrace.server.launch.serve import serve

    resolved = resolve(load(vars(given), os.environ))
    return serve(resolved.config, resolved.memory_lines)


def _gateway(given: argparse.Namespace) -> int:
    config = load_gateway(vars(given), os.environ)
    from headrace.gateway.process import run  # loads NIXL

    return run(config)


def _up(arguments: list[str]) -> int:
    """`headrace up`: its own flags, and those of the server that it starts."""
    given = _parse(arguments)
    options, serve_flags = cluster_options.split(arguments[1:])
    from headrace.server.cluster import up  # needs ray
    from headrace.server.config.resolve import resolve

    config = resolve(load(vars(given) | {"stages": "external"}, os.environ)).config
    return up.main(options, config, serve_flags, os.environ)


def _gib(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {MOST_GIB}")
    return int(text)


def _check(given: argparse.Namespace) -> int:
    flags = vars(given)
    memory_bytes = flags.pop("memory_gib") << 30
    config = load(flags, os.environ)
    from headrace.server.config.resolve import resolve

    resolved = resolve(config, memory_bytes)
    gateway_of(resolved.config)
    _open_files(resolved.config)
    print(to_toml(resolved.config), end="")
    print()
    if resolved.config.engine.cpuinfo != EngineConfig().cpuinfo:
        print(f"# {CPUINFO_VARIABLE}: this CPU is taken for the one of {resolved.config.engine.cpuinfo}")
    layout, first = resolved.config.scheduler.layout, resolved.config.transfer.data_port
    for rank, part in enumerate(resolved.parts):
        port = f", data port {first + rank}" if first and resolved.memory else ""
        print(f"# {layout.name(rank)}: {part}{port}")
    print(f"# decoder: {resolved.decoder}")
    for line in resolved.memory_lines:
        print(f"# {line}")
    return 0


def _open_files(config: Config) -> None:
    """What `headrace serve` opens. Raises ConfigError for files that it could not use."""
    from headrace.engine.load_plan import model_spec
    from headrace.engine.model.checkpoint import check_files
    from headrace.engine.model.source import resolve_source
    from headrace.text.tokenizer import load_tokenizer

    source = resolve_source(config.model.model)
    if source.kind != "stub":
        check_files(source, model_spec(source, config.model.decoder, config.server.cache_dir))
    load_tokenizer(config.model.model, config.server.cache_dir, config.server.chat_template)


def _bench(name: str | None, arguments: Sequence[str]) -> int:
    """Same as `python -m benchmarks.NAME ARGUMENTS` (or `python -m benchmarks` for all of them)."""
    module = "benchmarks.__main__" if name is None else f"benchmarks.{name}"
    if find_spec("benchmarks") is None or find_spec(module) is None:
        raise ConfigError(f"there is no {module.replace('.', '/')}.py here; run from a checkout of the repository")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
