"""The command line: what a user sees of help, versions and mistakes. No torch is loaded for any of it.

Also the names that `import penstock` offers, and a requirement of the package.
"""

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple
from unittest.mock import Mock

import pytest

import penstock
from penstock import __version__, cli
from penstock.cli import main
from penstock.engine.commands import serve
from penstock.engine.sampling_params import SamplingParams
from tests.support.fork_server import ROOT
from tests.support.refusals import table


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line in this process."""

    def run(*words: str) -> Ended:
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


def test_the_version_and_the_commands_are_shown(run: Run) -> None:
    printed = subprocess.run([sys.executable, "-m", "penstock.cli", "--version"], capture_output=True, text=True)
    assert printed.stdout.strip() == f"penstock {__version__}"
    for shown in (run("--help").out, run().err + run().out):
        assert "commands:" in shown and all(command in shown for command in ("serve", "route", "bench", "prove"))
    assert run().code == 2
    unknown = run("frob")
    assert unknown.err == "penstock: frob: there is no such command; commands are " + ", ".join(cli._COMMANDS) + "\n"
    assert run("serv").err == "penstock: serv: there is no such command; did you mean serve?\n"
    assert unknown.code == run("serv").code == 2


def test_an_early_interrupt_ends_silently(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.Command, "load", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "penstock_prove", Mock(USER_ERRORS=(), run=Mock(side_effect=KeyboardInterrupt)))
    monkeypatch.setattr(sys, "argv", ["penstock-prove"])
    assert main(["serve"]) == runpy.run_path("deploy/prove/__main__.py")["main"]() == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["serve", "route", "bench", "prove"])
def test_every_command_has_help(command: str, run: Run) -> None:
    ended = run(command, "--help")
    assert ended.code == 0 and f"usage: penstock {command}" in ended.out


def test_the_help_shows_common_options_and_all_on_request(run: Run) -> None:
    common, every = run("serve", "--help").out, run("serve", "--help=all").out
    shown = [{*re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)} for text in (common, every)]
    assert len(shown[0]) == len(serve.COMMON_FLAGS) and {*serve.COMMON_FLAGS} == shown[0] < shown[1]
    assert "--help=all" in common and "--kv-peer" in every and "--kv-peer" not in common


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*table(__file__, "mistakes"), *table(__file__, "unknown options"), *table(__file__, "unreadable values")],
)
def test_a_mistake_is_one_line_that_names_it(arguments: list[str], message: str, run: Run) -> None:
    code, _, shown = run(*arguments)
    assert code == 2 and message in shown and shown.count("\n") == 1
    assert shown.startswith(("penstock: ", f"penstock {arguments[0]}"))


def test_a_reader_that_leaves_costs_no_traceback() -> None:
    for reader in ("head -1", "true"):
        command = f"{sys.executable} -m penstock.cli models | {reader}"
        ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert ended.stdout.startswith("| family") == (reader != "true") and not ended.stderr
    code = "from penstock.engine.commands.serve import _say; _say('a'); _say('b'); import sys; sys.exit('alive')"
    ended = subprocess.run(
        ["sh", "-c", f'{{ {sys.executable} -c "sleep=1; {code}"; }} | true'], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == "alive\n"


def test_what_is_opened_lands_on_no_standard_stream_that_was_closed() -> None:
    program = (
        "import os; from penstock import cli; "
        "cli._run = lambda _: 10 * all(map(os.get_inheritable, range(3))) + os.open('/dev/null', 0); "
        "os._exit(cli.main([]))"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program], timeout=60)
    assert done.returncode == 13


def test_public_names_are_there_and_listed_and_an_unknown_one_is_named() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)
    assert penstock.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        penstock.Llm  # noqa: B018


def test_uvicorn_has_an_upper_bound_because_its_insides_matter() -> None:
    """A newer version may change what no interface promises: try it, then raise the bound."""
    text = (ROOT / "pyproject.toml").read_text()
    (required,) = (each for each in tomllib.loads(text)["project"]["dependencies"] if each.startswith("uvicorn"))
    match = re.fullmatch(r"uvicorn>=([\d.]+),<([\d.]+)", required)
    assert match is not None, required
    lowest, installed, bound = ([*map(int, each.split("."))] for each in (match[1], version("uvicorn"), match[2]))
    assert lowest <= installed < bound
