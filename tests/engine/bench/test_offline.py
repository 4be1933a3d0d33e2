"""`penstock bench throughput` and `latency`: options, prompts and reports, with an engine that only counts."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock.cli import main
from penstock.engine.commands import bench
from penstock.engine.commands.bench import offline
from penstock.engine.config import ConfigError
from tests.support.refusals import table


class CountingLLM:
    """Answers each prompt with as many tokens as asked for; remembers what it was asked."""

    made: ClassVar[list["CountingLLM"]] = []

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.model, self.options = model, options
        self.info = SimpleNamespace(vocab_size=300, max_model_len=4096)
        self.batches: list[tuple[list[Any], Any]] = []
        self.is_closed = False
        CountingLLM.made.append(self)

    def __enter__(self) -> "CountingLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.batches.append((prompts, params))
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)] * p.n)
            for prompt, p in zip(prompts, each, strict=True)
        ]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[CountingLLM]:
    monkeypatch.setattr(offline, "LLM", CountingLLM)
    CountingLLM.made = []
    return CountingLLM


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


def test_throughput_counts_prompts_and_all_answers(
    counting: type[CountingLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    options = ("--num-prompts", "4", "--input-len", "10", "--output-len", "3")
    assert run("throughput", *options, "--model", "m", "--dtype", "float32", "--output-json", str(path)) == 0
    (llm,) = counting.made
    assert llm.model == "m" and llm.options == {"skip_tokenizer": False, "dtype": "float32"} and llm.is_closed
    assert [len(prompts) for prompts, _ in llm.batches] == [4]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Throughput: ") and printed[0].endswith(" output tokens/s")
    assert printed[1:] == ["Total num prompt tokens:  40", "Total num output tokens:  12"]
    saved = json.loads(path.read_text())
    assert saved["num_requests"] == 4 and saved["total_num_tokens"] == 52
    assert saved["tokens_per_second"] == pytest.approx(52 / saved["elapsed_time"])
    assert saved["requests_per_second"] == pytest.approx(4 / saved["elapsed_time"])


def test_throughput_runs_every_request_to_its_full_length(counting: type[CountingLLM]) -> None:
    run("throughput", "--num-prompts", "50", "--input-len", "10", "--output-len", "20", "--random-range-ratio", "0.5")
    ((prompts, params),) = counting.made[0].batches
    assert all(each.ignore_eos for each in params)
    assert len({len(prompt) for prompt in prompts}) > 3 and len({each.max_tokens for each in params}) > 3
    assert max(max(prompt) for prompt in prompts) < 300
    with pytest.raises(ConfigError, match="trace_speed: 2.0 given; without a server all requests are sent at once"):
        run("throughput", "--dataset-name", "timed_trace", "--trace-speed", "2")


def test_latency_reports_the_measured_iterations_only(
    counting: type[CountingLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    options = ("--num-iters-warmup", "2", "--num-iters", "5", "--batch-size", "3", "--input-len", "6")
    assert run("latency", *options, "--output-len", "4", "--output-json", str(path)) == 0
    (llm,) = counting.made
    assert [len(prompts) for prompts, _ in llm.batches] == [3] * 7
    assert llm.batches[0][1].max_tokens == 4
    saved = json.loads(path.read_text())
    assert len(saved["latencies"]) == 5
    assert saved["avg_latency"] == pytest.approx(sum(saved["latencies"]) / 5)
    assert set(saved["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"Avg latency: {saved['avg_latency']} seconds"
    assert printed[3] == f"50% percentile latency: {saved['percentiles']['50']} seconds"


@pytest.mark.parametrize(("name", "option", "value", "least"), table(__file__, "offline counts"))
def test_a_count_out_of_range_is_named(
    counting: type[CountingLLM], name: str, option: str, value: int, least: int
) -> None:
    with pytest.raises(ConfigError, match=f"{option.replace('-', '_')}: {value} given; expected `int` >= {least}"):
        run(name, f"--{option}={value}")
    assert not counting.made, "nothing was loaded for it"


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", "startup"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "out.json"):
        with pytest.raises(SystemExit):
            run(name, "--output-json", str(path))
        assert (
            f"argument --output-json: {path} cannot be written; a file in an existing folder" in capsys.readouterr().err
        )


def test_a_result_that_cannot_be_written_at_the_end_is_printed(
    counting: type[CountingLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left on device; the result is print"):
        run("throughput", "--num-prompts", "2", "--output-json", "/dev/full")
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["num_requests"] == 2


def test_prompts_that_cannot_fit_are_refused_before_they_are_made(
    counting: type[CountingLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", "--input-len", "1000000000", "--output-len", "10"]) == 2
    assert "input_len: 1000000010 tokens with the answer; a request may have 4096" in capsys.readouterr().err
    assert counting.made[0].batches == []
