"""The `penstock` command: parses the command line and runs the chosen command.

It is the composition root and may import from every top-level package. It imports only what the chosen command needs,
so that `penstock --help` responds at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from penstock import __version__
from penstock.engine.commands.parser import Parser
from penstock.engine.vllm_options import nearest, unknown_option


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


def _run(arguments: list[str]) -> int:
    parser = Parser(prog="penstock", description="A compact inference-serving engine.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", dest="asked_command", metavar="COMMAND")
    chosen: ModuleType | None = None
    for name, (summary, _) in _COMMANDS.items():
        parsed = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        # Only the chosen command is imported and gets its options.
        if name in arguments[:1]:
            chosen = _COMMANDS[name].load()
            chosen.add_arguments(parsed)
            if hasattr(chosen, "COMMON_FLAGS"):
                parsed.show_common(chosen.COMMON_FLAGS, chosen.EXAMPLES)
    if arguments and not arguments[0].startswith("-") and chosen is None:
        suggestion = nearest(arguments[0], _COMMANDS) or f"; commands are {', '.join(_COMMANDS)}"
        parser.error(f"{arguments[0]}: there is no such command{suggestion}")
    args, unknown = parser.parse_known_args(arguments)
    if chosen is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:
        _refuse(commands.choices[args.asked_command], arguments[1:], unknown)
    try:
        code: int = chosen.run(args)
    except chosen.USER_ERRORS as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return code


def _refuse(command: argparse.ArgumentParser, words: list[str], unknown: list[str]) -> None:
    """Exit with an error that names the unknown option, and its replacement or the most similar flag. The error is that of
    the subcommand that the words name, if there is one."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            command = next((action.choices[word] for word in words if word in action.choices), command)
    known = [flag for action in command._actions for flag in action.option_strings]
    flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    command.error(f"{flag}: {unknown_option(flag, known)}")


class Command(NamedTuple):
    """A command: its line in the help, and its module, which has `add_arguments`, `run` and the tuple `USER_ERRORS` of the
    errors that a user can fix."""

    summary: str
    module: str

    def load(self) -> ModuleType:
        return import_module(f"penstock.{self.module}")


_COMMANDS = {
    "serve": Command("Serve a model over an OpenAI-compatible API.", "engine.commands.serve"),
    "chat": Command("Chat in the terminal.", "engine.commands.terminal_chat"),
    "route": Command("Route requests to many servers, each to the one that has its prefix in cache.", "router.serve"),
    "bench": Command("Measure a server or the engine itself.", "engine.commands.bench"),
    "prove": Command("Check that a server gives the same answers under load and faults as alone.", "prove"),
    "cache": Command("Inspect, verify or clear KV blocks on a disk.", "cache.tiers.disk.operate"),
    "models": Command("List the families of models that run.", "engine.commands.models"),
}

if __name__ == "__main__":
    sys.exit(main())
