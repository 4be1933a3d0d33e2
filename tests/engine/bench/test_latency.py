"""The latency benchmark, as far as it can be seen without an engine."""

from types import SimpleNamespace

import pytest

from penstock.cli import main
from penstock.engine.front import llm


class Engine:
    """Loaded, and never asked."""

    info = SimpleNamespace(vocab_size=100, max_model_len=200)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_prompts_that_cannot_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "LLM", Engine)
    assert main(["bench", "latency", "--input-len", "1000000000", "--output-len", "10"]) == 2
    assert "input_len: 1000000010 tokens with the answer; a request may have 200" in capsys.readouterr().err
