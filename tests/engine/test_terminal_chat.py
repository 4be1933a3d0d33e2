"""`penstock chat`: over a backend that answers with prepared bytes, and once over a server of its own."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.export import write_folder

from penstock.cli import main
from penstock.engine.commands import terminal_chat
from penstock.prove.own.server import group_of, stop
from tests.support.bench_endpoint import endpoint, streamed
from tests.support.default_file import needs_model
from tests.support.refusals import cases
from tests.support.router_stub import Seen, whole


def event(text: str | None, end: str | None = None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": end}]}).encode()


PAUSED = "paused"


def answer(seen: Seen, sock: socket.socket) -> bytes | None:
    """Do what the last message says."""
    if seen.line.startswith(b"GET"):
        return whole(b'{"data": [{"id": "m"}]}')
    match json.loads(seen.body)["messages"][-1]["content"]:
        case "refuse":
            return whole(b'{"error": {"message": "too long"}}', b"400 Bad Request")
        case "fail":
            return streamed(b'{"error": {"message": "the core died"}}')
        case "break":
            sock.sendall(streamed(event("half"))[:-5])
            return None
        case "wait":
            sock.sendall(streamed(event(PAUSED))[:-5])
            until = time.monotonic() + 60
            assert isinstance(sys.stdout, io.StringIO)
            while PAUSED not in sys.stdout.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
            sock.settimeout(10)
            while True:  # a signal that comes just before the client reads does not interrupt it
                os.kill(os.getpid(), signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1)
                    return None
    return streamed(event(None), event("Fine\x1b[2J"), event(", thanks.", "stop"), b"[DONE]")


def talk(monkeypatch: pytest.MonkeyPatch, *words: str, questions: str) -> tuple[int, str]:
    """Return the exit code and what was printed. Ctrl-C is heard also where a shell started the tests in the background."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(["chat", *words]), printed.getvalue()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("question", "shown", "error"), cases(__file__, "questions without an answer", PAUSED=PAUSED))
def test_a_conversation_goes_on_after_an_answer_that_failed_or_was_stopped(
    question: str, shown: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(answer) as server:
        monkeypatch.setenv("PENSTOCK_API_KEY", "k")
        words = [f"{server.url}/v1/", "--system-prompt", "Be brief."]
        code, printed = talk(monkeypatch, *words, questions=f"Hello\n\n{question}\nAgain\n")
        last = json.loads(server.seen[-1].body)
    assert (code, printed) == (0, f"Fine[2J, thanks.\n{shown}Fine[2J, thanks.\n")
    assert capsys.readouterr().err.splitlines()[1:] == [f"penstock: {error}"] * bool(error)
    before, kept = ["Be brief.", "Hello", "Fine\x1b[2J, thanks."], [] if error else ["wait", PAUSED]
    assert [message["content"] for message in last["messages"]] == [*before, *kept, "Again"]
    assert last["model"] == "m" and server.seen[-1].header(b"authorization") == [b"Bearer k"]


@pytest.mark.slow
@needs_model
def test_a_server_of_its_own_ends_with_the_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default model, left to itself, sometimes answers until its context is full."""
    write_folder(None, tmp_path)
    settings = {"temperature": 0.0, "max_new_tokens": 12, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    groups: list[list[int]] = []

    def stop_and_look(server: "subprocess.Popen[bytes]") -> None:
        stop(server)
        groups.append(group_of(server.pid))

    monkeypatch.setattr(terminal_chat, "stop", stop_and_look)
    code, printed = talk(monkeypatch, str(tmp_path), questions="What is the capital of France?\n")
    assert code == 0 and len(printed.strip()) > 10
    assert groups == [[]]
    assert talk(monkeypatch, "/nowhere", questions="") == (2, "")
