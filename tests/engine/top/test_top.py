"""`penstock top` as its user runs it, against the real server and the real router, with and without a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.commands.top.command import ENTER, LEAVE, frame
from penstock.engine.commands.top.screen import Span
from penstock.engine.messages import Stats
from penstock.executor.protocol import ExpertUpdate
from tests.support.fake_engine import FakeEngine
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub
from tests.support.running_server import running, until

COMMAND = [sys.executable, "-m", "penstock.cli", "top"]
STATS = Stats(
    num_running=3,
    num_waiting=1234,
    num_blocks=64,
    num_used_blocks=16,
    num_cached_blocks=32,
    prefix_queries=200,
    prefix_hits=50,
    num_steps=4,
    step_s=0.1,
    tiers={"host": {"used_blocks": 5, "capacity_blocks": 50}, "disk": {"used_blocks": 7}},
    experts=ExpertUpdate(
        balance=0.5, rank_load=b"\x00\x00\x80\x3e\x00\x00\x40\x3f", expert_load=b"\x00\x00\x00\x3f" * 2
    ),
)


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", **environment}
    command = [*COMMAND, "--interval", "0.1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def shown(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "\x1b" not in result.stdout
    return re.sub(r"[ █▒·]+", " ", result.stdout)


def test_without_a_terminal_one_view_of_a_server_is_printed_as_plain_text() -> None:
    engine = FakeEngine()
    engine.stats = STATS
    with running(engine) as server:
        server.complete("abc", max_tokens=5)
        text = shown(top(server.url))
    assert text.startswith(f"Penstock {server.url} tiny\n")
    for words in ("running 3 generated 0 tok/s prefix hits 25 %", "waiting 1,234 prompts 0 tok/s step 25 ms"):
        assert words in text
    for words in ("device 16 held, 32 cached of 64", "host 5 of 50", "disk 7 blocks", "Ranks balance 50 %", "1 75 %"):
        assert words in text
    assert re.search(r"first token .*– .*– .*– 0", text)  # nothing between the two looks


def test_a_router_is_shown_with_its_replicas_and_why_one_is_out() -> None:
    with running() as server, stub() as other, running_router(server.url, other.url) as router:
        router.complete("abc", model="tiny")
        other.is_ready = False
        until(lambda: router.states() == ["up", "draining"])
        text = shown(top(f"http://127.0.0.1:{router.port}"))
    assert "1 of 2 replicas take requests" in text and re.search(rf"{other.url} draining \(\S.*\) 0 ", text)
    assert re.search(rf"{server.url} up 0 0 [\d,]+ – 1 0 0", text)
    assert "Since the start answers with 200" in text


def test_control_characters_of_a_server_do_not_reach_the_terminal() -> None:
    with running(served_model_names=("\x1b]0;owned\x07\x9b31m",)) as server:
        assert "\N{REPLACEMENT CHARACTER}]0;owned" in shown(top(server.url))


def test_the_key_comes_from_the_environment() -> None:
    with running(api_keys=("sk-right",)) as server:
        assert "running" in shown(top(server.url, PENSTOCK_API_KEY="sk-right"))
        assert "running" in shown(top(server.url, OPENAI_API_KEY="sk-right"))
        refused = top(server.url, PENSTOCK_API_KEY="sk-wrong")
    assert refused.returncode == 2 and "wants an API key" in refused.stderr and "sk-wrong" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "url: 'ftp://x' is not a URL"),
        (["http://127.0.0.1:1"], "url: http://127.0.0.1:1 is not reachable"),
        (["--interval", "0"], "interval: 0.0 is out of range, 0.1 to 60 seconds"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    result = top(*arguments)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_an_address_that_is_no_server_of_ours_is_said() -> None:
    with stub() as other:
        result = top(other.url)
    assert result.returncode == 2 and "/metrics answered 404" in result.stderr


@pytest.mark.parametrize(
    ("number", "colour"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGQUIT, True), (signal.SIGHUP, True)],
)
def test_a_terminal_is_drawn_again_and_again_and_gets_its_screen_back(number: int, colour: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"PYTHONIOENCODING": "utf-8"} | ({} if colour else {"NO_COLOR": "1"})
    ours, theirs = pty.openpty()
    with running() as server:
        command = ["env", "--default-signal", *COMMAND, "--interval", "0.1", server.url]
        process = subprocess.Popen(command, stdout=theirs, env=environment)
        os.close(theirs)
        output = read_until(ours, lambda text: text.count("\x1b[H") >= 3)
        process.send_signal(number)
        output += read_until(ours, lambda text: LEAVE in text)
        assert process.wait(30) == 0
    os.close(ours)
    assert output.startswith(ENTER) and output.endswith(LEAVE)
    styles = set(re.findall(r"\x1b\[\d*m", output))
    assert (len(styles) >= 4) if colour else (styles == set())


def test_a_terminal_that_goes_away_ends_it_without_a_word(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with running() as server:
        command = [*COMMAND, "--interval", "0.1", server.url]
        script = f"import os, sys; os.dup2(os.open({str(errors)!r}, os.O_CREAT | os.O_WRONLY), 2)"
        pid, ours = pty.fork()  # as a shell's child: it is sent a SIGHUP
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"{script}; os.execv(sys.executable, {command})"])
        read_until(ours, lambda text: text.count("\x1b[H") >= 3)
        os.close(ours)
        assert os.waitpid(pid, 0)[1] == 0 and errors.read_text() == ""


def test_q_ends_it() -> None:
    ours, theirs = pty.openpty()
    with running() as server:
        process = subprocess.Popen([*COMMAND, "--interval", "60", server.url], stdin=theirs, stdout=theirs)
        os.close(theirs)
        read_until(ours, lambda text: "\x1b[H" in text)
        os.write(ours, b"q")
        read_until(ours, lambda text: LEAVE in text)
        assert process.wait(30) == 0
    os.close(ours)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with running() as server:
        process = subprocess.Popen(
            [*COMMAND, "--interval", "0.1", "--once", server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == 0 and process.stderr.read() == ""
        process.stderr.close()


def read_until(descriptor: int, enough: Callable[[str], bool]) -> str:
    data, deadline_s = b"", time.monotonic() + 30
    while not enough(data.decode(errors="replace")):
        assert time.monotonic() < deadline_s, data
        if select.select([descriptor], [], [], 1.0)[0]:
            data += os.read(descriptor, 65536)
    return data.decode(errors="replace")


def test_a_frame_is_cut_to_the_screen_and_leaves_nothing_of_the_one_before() -> None:
    lines = [[Span("abc", "strong"), Span("defgh")], [], [Span("x")], [Span("unseen")]]
    assert frame(lines, 5, 4, has_colour=False) == "\x1b[Habcde\x1b[K\r\n\x1b[K\r\nx\x1b[K\x1b[J"
    assert "\x1b[1mabc\x1b[0mde\x1b[K" in frame(lines, 5, 4, has_colour=True)
