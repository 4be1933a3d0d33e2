"""Start-up failures print what docs/quickstart.md says."""

import json
import re
import socket
from pathlib import Path

import pytest

from penstock import cli
from tests.support.default_file import needs_model

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
ROWS = re.findall(r"^\| `penstock (serve[^`]*)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
SLOW = re.compile("max-model-len|device|tensor-parallel-size|kv-cache-bytes")  # seconds each: they import torch
assert len(ROWS) >= 10, "the table of the page cannot be read"
CASES = [pytest.param(*row, id=row[0], marks=[pytest.mark.slow] * bool(SLOW.search(row[0]))) for row in ROWS]


@needs_model
@pytest.mark.parametrize(("command", "message"), CASES)
def test_a_failed_start_prints_the_message_on_the_page(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"PORT": str(taken.getsockname()[1]), "DIR": str(tmp_path)}
        values |= {"EMPTY": str(tmp_path / "empty"), "NO_WEIGHTS": str(tmp_path / "no_weights")}
        code = cli.main([values.get(word, word) for word in command.split()])
        expected = message.replace("PORT", values["PORT"])
    assert code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
