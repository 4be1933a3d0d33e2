"""The `penstock` command: parses the command line and runs the chosen command.

It is the composition root and may import from every top-level package. It imports only what the chosen command needs,
so that `penstock --help` responds at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock import __version__
from penstock.engine.removed import REMOVED, REMOVED_COMMANDS
from penstock.engine.vllm_options import nearest

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Print errors that a user can fix as one line on stderr."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # no socket may get the number of a closed standard stream
        os.set_inheritable(number, True)
    os.close(number)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:  # None if the stream was closed at the start
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
    for removed in filter(REMOVED_COMMANDS.get, (" ".join(arguments[:2]), *arguments[:1])):
        print(f"penstock: {removed} is not a command any more: {REMOVED_COMMANDS[removed]}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="penstock", description="A compact inference-serving engine.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", dest="asked_command", metavar="COMMAND")
    for name, (summary, load) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        # Only the chosen command is imported and gets its options.
        if name in arguments[:1]:
            add_arguments, run = load()
            add_arguments(command)
            command.set_defaults(run=run)
    args, unknown = parser.parse_known_args(arguments)
    if args.asked_command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:
        _refuse(_innermost(commands.choices[args.asked_command], arguments[1:]), unknown)
    code: int = args.run(args)
    return code


def _innermost(command: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that the words name, or of the command itself."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return next((action.choices[word] for word in words if word in action.choices), command)
    return command


def _refuse(command: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Exit with an error that names the unknown option, and its replacement or the most similar flag."""
    known = [flag for action in command._actions for flag in action.option_strings]
    flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if flag.startswith("--") and name in REMOVED:
        why = REMOVED[name]
    else:
        why = f"there is no such option{nearest(flag, known)}"
    command.exit(2, f"{command.prog}: {flag}: {why}\n")  # one line: the usage of `serve` fills a screen


def _user_errors() -> tuple[type[BaseException], ...]:
    from penstock.cache.tiers.disk.operate import CacheError
    from penstock.engine.commands.prove.options import ProveError
    from penstock.engine.config import ConfigError
    from penstock.engine.front.client import EngineDead
    from penstock.engine.http.sockets import PortError
    from penstock.engine.model_files import ModelError
    from penstock.engine.sampling_params import InvalidRequest
    from penstock.executor.protocol import ExecutorError
    from penstock.router.backend import RouteError

    engine = (CacheError, ConfigError, EngineDead, InvalidRequest, ModelError, PortError)
    return (*engine, ExecutorError, ProveError, RouteError)


def _serve() -> Command:
    from penstock.engine.commands import serve

    return serve.add_arguments, serve.run


def _route() -> Command:
    from penstock.router import serve

    return serve.add_arguments, serve.run


def _bench() -> Command:
    from penstock.engine.commands import bench

    return bench.add_arguments, bench.run


def _prove() -> Command:
    from penstock.engine.commands import prove

    return prove.add_arguments, prove.run


def _cache() -> Command:
    from penstock.cache.tiers.disk import operate

    return operate.add_arguments, operate.run


def _models() -> Command:
    from penstock.engine.commands import models

    return models.add_arguments, models.run


_COMMANDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "serve": ("Serve a model over an OpenAI-compatible API.", _serve),
    "route": ("Route requests to many servers, each to the one that has its prefix in cache.", _route),
    "bench": ("Measure a server or the engine itself.", _bench),
    "prove": ("Check that a server gives the same answers under load and faults as alone.", _prove),
    "cache": ("Inspect, verify or clear KV blocks on a disk.", _cache),
    "models": ("List the families of models that run.", _models),
}

if __name__ == "__main__":
    sys.exit(main())
