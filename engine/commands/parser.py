"""The parser of the command line: an error is one line, and `--help` shows the common options, `--help=all` every one."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    _common: Sequence[str] = ()  # the flags that `--help` shows; none: all

    def show_common(self, flags: Sequence[str], examples: str) -> None:
        """Let `--help` show only these flags, the arguments without a flag, and examples."""
        self._common = ("--help", *flags)
        self.usage = f"{self.prog} [options] [model]"
        self.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of the examples
        self.epilog = f"{self.prog} --help=all shows every option.\n\nexamples:\n{examples}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._common and "--help=all" in args:
            self._common, args = (), ["--help"]
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        for action in self._actions:
            if self._common and action.option_strings and not {*action.option_strings} & {*self._common}:
                action.help = argparse.SUPPRESS
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # without the usage, which fills a screen for `serve`
