"""`penstock bench startup` with servers of a few lines in place of a model."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from penstock.cli import main
from penstock.engine.commands.bench import startup
from tests.support.programs import all_gone
from tests.support.refusals import hardest
from tests.support.running_server import until

# Listens at once, answers 503 until it is "loaded", and starts a child of its own as an engine does.
SERVER = """
import http.server, json, os, subprocess, sys, time
started = time.monotonic()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, after_s, body):
        is_up = time.monotonic() - started > after_s
        self.send_response(200 if is_up else 503)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if is_up else b"loading")
    def do_GET(self):
        self.reply(0.1, {"data": [{"id": "m"}]})
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["model"] == "m" and request["max_tokens"] == 1 and request["prompt"] == "Hi"
        self.reply(0.3, {"choices": []})
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_start_lasts_until_the_first_token_and_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", SERVER, "{port}", str(pids)]
    assert startup.first_token_s(command, prompt="Hi", timeout_s=120) >= 0.3
    assert all_gone([*map(int, pids.read_text().split())])


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        ("import sys; sys.exit('no such model: x')", 120, r"ended with code 1\nno such model: x"),
        ("import time; time.sleep(600)", 0.3, "/v1/models was not answered"),
    ],
)
def test_a_server_that_ends_or_never_answers_is_reported(code: str, timeout_s: float, message: str) -> None:
    with pytest.raises(startup.StartupError, match=message):
        startup.first_token_s([sys.executable, "-c", code], timeout_s=timeout_s)


def test_the_report_leaves_out_the_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_token_s = Mock(side_effect=[9.0, 2.0, 4.0])
    monkeypatch.setattr(startup, "first_token_s", first_token_s)
    path = tmp_path / "out.json"
    words = ["--num-iters-warm", "2", "--command", "x {port}", "--output-json", str(path)]
    assert main(["bench", "startup", *words]) == 0
    assert json.loads(path.read_text()) == {"avg_warm_startup_time": 3.0, "warm_startup_times": [2.0, 4.0]}
    assert capsys.readouterr().out == "Avg startup time: 3.00 seconds\n"
    assert first_token_s.call_args_list == [call(["x", "{port}"])] * 3


@pytest.mark.parametrize("number", hardest([signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], signal.SIGHUP))
def test_a_signal_ends_the_server_as_well(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER.replace("> after_s", "> 600"))
    pids = tmp_path / "pids"
    command = f"{sys.executable} {tmp_path / 'server.py'} {{port}} {pids}"
    with subprocess.Popen(
        ["env", "--default-signal", sys.executable, "-m", "penstock.cli", "bench", "startup", "--command", command],
        stderr=subprocess.PIPE,
    ) as command_line:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        command_line.send_signal(number)
        assert command_line.wait(60) == 130
    assert all_gone([*map(int, pids.read_text().split())])


def test_a_program_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "--command", "nosuchprogram {port}"]) == 1
    assert capsys.readouterr().err == "penstock: [Errno 2] No such file or directory: 'nosuchprogram'\n"
