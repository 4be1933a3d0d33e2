"""Levels of the log by room: wrong ones are refused by name, and child processes inherit them."""

import logging
import os
import subprocess
import sys

import msgspec
import pytest

from penstock import cli
from penstock.executor.logs import LOG_VARIABLE, log_levels
from penstock.executor.process_life import begin, send
from tests.support.programs import printed
from tests.support.refusals import cases, table

PARENT = """
import sys
import msgspec
from penstock.executor.logs import log_to_stderr
from penstock.executor.process_life import start_child
from tests.test_log_levels import Levels, Nothing, levels
log_to_stderr(sys.argv[1] or None)
child = start_child("tests.test_log_levels", "a child", Nothing())
heard = msgspec.msgpack.decode(child.channel.recv_bytes(), type=Levels)
child.kill()
print(msgspec.json.encode([levels(), heard]).decode())
"""


class Nothing(msgspec.Struct):
    pass


class Levels(msgspec.Struct):
    levels: dict[str, int]


def levels() -> Levels:
    names = ("", "penstock", "penstock.router", "penstock.cache")
    return Levels({name: logging.getLogger(name).getEffectiveLevel() for name in names})


def main() -> None:
    """Report this process's levels, as a child process."""
    _, channel = begin(Nothing)
    send(channel, levels())


HOSTILE = """
import logging
from penstock.executor.logs import log_to_stderr
log_to_stderr()
log = logging.getLogger("penstock.engine")
text = "a\\nb\\r\\x1b[2J\\x85\\u2028\\u202e\\udc80\\x00\\u00e9\\u2192"
log.warning("tools %s: refused", text)
try:
    raise ValueError(text)
except ValueError:
    log.exception("a request failed")
"""


def test_a_clients_text_begins_no_line_of_the_log_and_moves_no_cursor() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, env=environment, check=True)
    *lines, end = done.stderr.decode().split("\n")
    escaped = r"\r\x1b[2J\x85\u2028\u202e\udc80\x00é→"
    assert end == "" and all(line.isprintable() for line in lines)
    assert lines[0].endswith(f" W tools a\\nb{escaped}: refused")
    assert lines[1].endswith(" E a request failed") and lines[2] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in lines[2:])  # an exception's own line feed begins an indented line
    assert lines[-2:] == ["  ValueError: a", f"  b{escaped}"]


@pytest.mark.parametrize(("text", "levels"), cases(__file__, "log levels by room"))
def test_levels_are_read_by_room(text: str, levels: dict[str, str]) -> None:
    assert log_levels(text) == levels


@pytest.mark.parametrize(("text", "message"), table(__file__, "log levels"))
def test_other_words_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        log_levels(text)


@pytest.mark.parametrize("command", ["serve", "route"])
def test_a_command_refuses_it_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "--log-level", "router=loud"])
    assert "--log-level: log_level: 'loud' is not a level" in capsys.readouterr().err
    monkeypatch.setenv(LOG_VARIABLE, "kitchen=info")
    assert cli.main([command]) == 2
    assert "log_level: 'kitchen' is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "environment", "levels"), cases(__file__, "log levels of processes", **globals()))
def test_children_log_at_the_parents_levels(
    option: str, environment: dict[str, str], levels: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    shown = printed(PARENT, option, **environment)
    assert shown.count(str(levels).replace("'", '"').replace(" ", "")) == 2, shown
