"""`penstock serve` as its user runs it: a real process, a real model of a few thousand weights, real signals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_engine import byte_tokenizer

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}

pytestmark = pytest.mark.timeout(300)  # importing torch, several times


class Server:
    """The process, with what it printed so far."""

    def __init__(self, folder: Path, *options: str, **variables: str) -> None:
        inherited = {**os.environ, "TMPDIR": str(folder.parent), "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock.cli",
                "serve",
                str(folder),
                "--load-format",
                "dummy",
                "--port",
                "0",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=inherited | variables,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: str, timeout_s: float = 200.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)
        return found

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.close()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    byte_tokenizer().save(folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, "--kv-cache-bytes", "8MiB", "--api-key", "secret")
    yield server
    server.close()


def test_it_prints_its_memory_and_address_answers_and_leaves_nothing(server: Server, folder: Path) -> None:
    url = server.wait_for(r"Ready after .* s: (http://\S+)")[1]
    server.wait_for(r"curl -N http.*\n")
    assert "KV cache" in server.output and "secret" not in server.output
    # The byte tokenizer has no chat template: what is printed must be answered nevertheless.
    assert "/v1/completions" in server.output and "/v1/chat/completions" not in server.output
    printed = server.wait_for(r"(?s)Try:\n  (curl .*?)\n")[1]
    command = ["bash", "-c", printed]
    tried = subprocess.run(
        command, env=os.environ | {"PENSTOCK_API_KEY": "secret"}, capture_output=True, text=True, timeout=60
    )
    assert tried.returncode == 0 and tried.stdout.rstrip().endswith("data: [DONE]"), tried
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer secret"}, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert answer.json()["model"] == "tiny"
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    assert server.stop(signal.SIGTERM) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_model_loads_leaves_nothing(server: Server, folder: Path, number: signal.Signals) -> None:
    server.wait_for("Starting tiny")
    assert server.stop(number) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_nothing_is_left_of_a_server_that_is_killed_while_the_model_loads(server: Server, folder: Path) -> None:
    server.wait_for("Loading")  # the engine core says so, and does not listen until all is loaded
    server.process.kill()
    server.process.wait(60)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_a_port_in_use_is_said_before_the_model_loads(server: Server, folder: Path) -> None:
    port = server.wait_for(r"Ready after .* s: http://\S+:(\d+)")[1]
    second = Server(folder, "--port", port)
    assert second.process.wait(60) == 2
    second.close()
    assert "Address already in use" in second.output and "Starting" not in second.output
