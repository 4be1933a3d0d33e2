"""`penstock serve` as its user runs it: a real process, a real model of a few thousand weights, real signals."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmarks.export import save_tokenizer

from tests.support.fake_engine import byte_tokenizer
from tests.support.programs import Command

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}

pytestmark = pytest.mark.timeout(300)  # importing torch, several times


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def served(folder: Path, *options: str, **environment: str) -> Command:
    words = ("serve", folder, "--load-format", "dummy", "--kv-cache-bytes", "8MiB", "--port", "0", *options)
    return Command(*words, max_files=None, TMPDIR=str(folder.parent), **environment)


@pytest.fixture
def server(folder: Path) -> Iterator[Command]:
    with served(folder, "--api-key", "secret") as server:
        yield server


def test_it_prints_its_memory_and_address_answers_and_leaves_nothing(server: Command, folder: Path) -> None:
    url = server.url()
    server.wait_for(r"curl -N http.*\n")
    assert "KV cache" in server.output and "secret" not in server.output
    # The byte tokenizer has no chat template: what is printed must be answered nevertheless.
    assert "/v1/completions" in server.output and "/v1/chat/completions" not in server.output
    printed = server.wait_for(r"(?s)Try:\n  (curl .*?)\n")[1]
    environment = os.environ | {"PENSTOCK_API_KEY": "secret"}
    tried = subprocess.run(["bash", "-c", printed], env=environment, capture_output=True, text=True, timeout=60)
    assert tried.returncode == 0 and tried.stdout.rstrip().endswith("data: [DONE]"), tried
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer secret"}, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
    assert answer.json()["model"] == "tiny"
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    with served(folder, "--port", url.rpartition(":")[2]) as second:
        assert second.process.wait(60) == 2
    assert "Address already in use" in second.output and "Starting" not in second.output, "no model was loaded"
    assert server.stop(signal.SIGTERM) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_server_that_ends_while_the_model_loads_leaves_nothing(
    server: Command, folder: Path, number: signal.Signals
) -> None:
    # The engine core says "Loading", and does not listen until all is loaded.
    server.wait_for("Loading" if number == signal.SIGKILL else "Starting tiny")
    assert server.stop(number) == (-number if number == signal.SIGKILL else 0)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
