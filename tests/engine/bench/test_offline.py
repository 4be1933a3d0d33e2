"""`penstock bench throughput` and `latency`: options, prompts and reports, with an engine that only counts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from penstock.cli import main
from penstock.engine.commands.bench import offline


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Put an engine that answers each prompt with as many tokens as it may into the place of LLM."""

    def generate(prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=[1] * one.max_tokens)])
            for prompt, one in zip(prompts, each, strict=True)
        ]

    llm = MagicMock(info=SimpleNamespace(vocab_size=300, max_model_len=4096), generate=MagicMock(side_effect=generate))
    llm.__enter__.return_value = llm
    monkeypatch.setattr(offline, "LLM", MagicMock(return_value=llm))
    return llm


def test_throughput_counts_all_tokens(opened: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    lengths = ("--num-prompts", "50", "--input-len", "10", "--output-len", "20", "--random-range-ratio", "0.5")
    assert main(["bench", "throughput", *lengths, "--model=m", "--dtype=float32", "--output-json", str(path)]) == 0
    offline.LLM.assert_called_once_with("m", skip_tokenizer=False, dtype="float32")  # type: ignore[attr-defined]
    assert opened.__exit__.called
    ((prompts, params),) = (call.args for call in opened.generate.call_args_list)
    assert len({len(prompt) for prompt in prompts}) > 3 and len({each.max_tokens for each in params}) > 3
    assert all(each.ignore_eos for each in params) and max(max(prompt) for prompt in prompts) < 300
    num_input, num_output = sum(map(len, prompts)), sum(each.max_tokens for each in params)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Throughput: ") and printed[0].endswith(" output tokens/s")
    assert printed[1:] == [f"Total num prompt tokens:  {num_input}", f"Total num output tokens:  {num_output}"]
    saved = json.loads(path.read_text())
    assert saved["num_requests"] == 50 and saved["total_num_tokens"] == num_input + num_output
    assert saved["tokens_per_second"] == pytest.approx((num_input + num_output) / saved["elapsed_time"])
    assert saved["requests_per_second"] == pytest.approx(50 / saved["elapsed_time"])


def test_latency_reports_the_measured_iterations_only(
    opened: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [0, 1, 10, 12, 20, 23, 30, 34, 40, 45, 50, 56, 60, 67]  # the batches take 1, 2, … 7 seconds
    monkeypatch.setattr(offline, "time", SimpleNamespace(perf_counter=iter(times).__next__))
    path = tmp_path / "out.json"
    options = ("--num-iters-warmup", "2", "--num-iters", "5", "--batch-size", "3", "--input-len", "6")
    assert main(["bench", "latency", *options, "--output-len", "4", "--output-json", str(path)]) == 0
    batches = [call.args for call in opened.generate.call_args_list]
    assert [[len(prompt) for prompt in prompts] for prompts, _ in batches] == [[6] * 3] * 7
    assert batches[0][1].max_tokens == 4
    saved = json.loads(path.read_text())
    assert saved["latencies"] == [3, 4, 5, 6, 7] and saved["avg_latency"] == 5
    assert saved["percentiles"] == pytest.approx({"10": 3.4, "25": 4, "50": 5, "75": 6, "90": 6.6, "99": 6.96})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Avg latency: 5.0 seconds" and printed[3] == "50% percentile latency: 5.0 seconds"


def test_a_result_that_cannot_be_written_is_printed(opened: MagicMock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--num-prompts", "2", "--output-json", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out[printed.out.index("{") :])["num_requests"] == 2
    assert "/dev/full cannot be written: No space left on device; the result is printed" in printed.err


def test_prompts_beyond_the_context_are_not_even_made(opened: MagicMock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "1000000000", "--output-len", "10"]) == 2
    assert "input_len: 1000000010 tokens with the answer; a request may have 4096" in capsys.readouterr().err
    assert not opened.generate.called
