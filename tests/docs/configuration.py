"""Writes docs/configuration.md from the parsers of the commands, so that the page and `--help` are one text.

python -m tests.docs.configuration
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from penstock import cli

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARK = "<!-- what follows is written by python -m tests.docs.configuration -->"


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command with options of its own: `penstock serve`, `penstock bench latency` …"""
    for name, command in cli._COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"penstock {name}", description=command.summary)
        command.load().add_arguments(parser)
        yield from _leaves(parser)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser.prog, parser
    for action in nested:
        for child in action.choices.values():
            yield from _leaves(child)


def tables() -> str:
    lines = []
    for name, parser in parsers():
        lines += [f"## {name}", "", parser.description or "", ""]
        for group in parser._action_groups:
            rows = [row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
            if rows:
                lines += [f"| {(group.title or '').replace('positional arguments', 'arguments')} | |", "|---|---|"]
                lines += [*filter(None, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def row(action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS:
        return ""
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    names = ", ".join(action.option_strings) or action.dest
    flag = f"{names} {value}" if action.option_strings and takes_value else names
    text = (action.help or "") % {"default": action.default, "prog": "penstock"}
    return f"| `{flag}` | {text} |".replace("\n", " ")


def page(text: str) -> str:
    """Return the page with new tables."""
    head, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE.name} has lost its mark"
    return f"{head}{MARK}\n\n{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"{PAGE.name} is written")
