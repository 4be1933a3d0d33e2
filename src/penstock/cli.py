"""The `penstock` command: parses, then hands over to the room that does the work.

The composition root: it may import from every room, and does so only for the command that was asked for, so
that `penstock --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock import __version__
from penstock.engine.vllm_options import nearest

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is the command's. Errors a user can mend are one line on stderr."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # closed at the start: no socket must land there
        os.set_inheritable(number, True)
    os.close(number)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:  # it may have been closed
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except _user_errors() as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock", description="A compact inference-serving engine.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", dest="asked_command", metavar="COMMAND")
    for name, (summary, load) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the command that is asked for is imported, and so only it has options to show.
        if name in arguments[:1]:
            add_arguments, run = load()
            add_arguments(command)
            command.set_defaults(run=run)
    args, unknown = parser.parse_known_args(arguments)
    if args.asked_command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:
        _refuse(commands.choices[args.asked_command], unknown)
    code: int = args.run(args)
    return code


def _refuse(command: argparse.ArgumentParser, unknown: list[str]) -> None:
    """What the command does not know, with the flag that may have been meant."""
    known = [flag for action in command._actions for flag in action.option_strings]
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    command.error(f"{word}: there is no such option{nearest(word.partition('=')[0], known)}")


def _user_errors() -> tuple[type[BaseException], ...]:
    from penstock.cache.tiers.disk.operate import CacheError
    from penstock.engine.config import ConfigError
    from penstock.engine.front.client import EngineDead
    from penstock.engine.model_files import ModelError
    from penstock.engine.sampling_params import InvalidRequest
    from penstock.executor.protocol import ExecutorError
    from penstock.router.backend import RouteError
    from penstock.router.deploy.file import DeployError

    return CacheError, EngineDead, ConfigError, ModelError, InvalidRequest, ExecutorError, RouteError, DeployError


def _serve() -> Command:
    from penstock.engine.commands import serve

    return serve.add_arguments, serve.run


def _route() -> Command:
    from penstock.router import serve

    return serve.add_arguments, serve.run


def _deploy() -> Command:
    from penstock.engine.commands import serve
    from penstock.router import deploy
    from penstock.router import serve as route
    from penstock.router.deploy.file import Command as Program

    replica, router = Program(("penstock.cli", "serve"), serve), Program(("penstock.cli", "route"), route)
    return deploy.add_arguments, lambda args: deploy.run(args, replica, router)


def _bench() -> Command:
    from penstock.engine.commands import bench
    from penstock.engine.commands.bench import reference
    from penstock.eplb import bench as eplb

    def compare(args: argparse.Namespace) -> int:
        from penstock.executor.models.reference import reference_logprobs

        return reference.run(args, reference_logprobs)

    others = [
        ("eplb", eplb, "Plans that spread experts over ranks: time, balance, moves; tables and a heat map."),
        (
            "logprobs",
            SimpleNamespace(add_arguments=reference.add_arguments, run=compare),
            "How far log-probabilities are from those of a transformers forward pass.",
        ),
    ]
    return lambda parser: bench.add_arguments(parser, others), bench.run


def _top() -> Command:
    from penstock.engine.commands.top import command

    return command.add_arguments, command.run


def _prove() -> Command:
    from penstock.engine.commands import prove

    return prove.add_arguments, prove.run


def _cache() -> Command:
    from penstock.cache.tiers.disk import operate

    return operate.add_arguments, operate.run


def _models() -> Command:
    return _add_models_arguments, _run_models


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON array of objects instead of a table")


def _run_models(args: argparse.Namespace) -> int:
    import json

    from penstock.engine.text.tools import formats, thinking
    from penstock.executor.models.catalogue import as_text, table

    rows = table(formats.NAMES, thinking.NAMES)
    print(json.dumps(rows, indent=2) if args.json else as_text(rows))
    return 0


def _export() -> Command:
    return _add_export_arguments, _run_export


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a .gguf file, folder or hub name (default: the default model)")
    parser.add_argument("--output", "-o", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")


def _run_export(args: argparse.Namespace) -> int:
    """Write a model as a Hugging Face folder, so that other engines can run the very same weights."""
    from penstock.engine.model_files import recommended_sampling, resolve_model
    from penstock.engine.text.tokenizer import load_tokenizer
    from penstock.executor.loading.checkpoint import open_checkpoint
    from penstock.executor.models.export import export

    files = resolve_model(args.model)
    tokenizer = load_tokenizer(files)

    def save(folder: Path) -> None:
        sampling = {name: value for name, value in recommended_sampling(files).items() if name != "max_tokens"}
        tokenizer.save(folder, sampling and {"do_sample": True, **sampling})

    export(open_checkpoint(files.path), args.output, args.dtype, progress=print, beside=save)
    print(f"{files.name} written to {args.output}")
    return 0


_COMMANDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "serve": ("Serve a model over an OpenAI-compatible API.", _serve),
    "route": ("Put one address in front of many servers, each request where its prefix lies.", _route),
    "deploy": ("Run replicas and their router over a Ray cluster, as a file says.", _deploy),
    "top": ("Watch a server or a router in the terminal.", _top),
    "bench": ("Measure a server or the engine itself.", _bench),
    "prove": ("Prove that a server answers under load and faults what it answers alone.", _prove),
    "cache": ("Inspect, verify or clear KV blocks on a disk.", _cache),
    "models": ("List the families of models that run.", _models),
    "export": ("Write a model as a Hugging Face folder (safetensors and tokenizer).", _export),
}

if __name__ == "__main__":
    sys.exit(main())
