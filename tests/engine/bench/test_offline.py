"""`penstock bench throughput` and `latency`: options, prompts and reports, with an engine that only counts. `penstock bench
startup` with servers of a few lines in place of a model. The prompts of a benchmark, and when they are sent."""

import argparse
import json
import math
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest

from penstock.cli import main
from penstock.engine.commands.bench import check_options, offline, startup
from penstock.engine.commands.bench.datasets import DATASETS, DatasetOptions, PromptSource, Sample
from penstock.engine.commands.bench.serving import arrival_times
from penstock.engine.config import ConfigError
from penstock.engine.options import add_options
from tests.support.programs import all_gone
from tests.support.refusals import cases, hardest, table
from tests.support.running_server import until


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
    percentiles = [f"{each}% percentile latency: {value} seconds" for each, value in saved["percentiles"].items()]
    assert printed == ["Avg latency: 5.0 seconds", *percentiles]


def test_a_result_that_cannot_be_written_is_printed(opened: MagicMock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--num-prompts", "2", "--output-json", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out[printed.out.index("{") :])["num_requests"] == 2
    assert "/dev/full cannot be written: No space left on device; the result is printed" in printed.err


def test_prompts_beyond_the_context_are_not_even_made(opened: MagicMock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "1000000000", "--output-len", "10"]) == 2
    assert "input_len: 1000000010 tokens with the answer; a request may have 4096" in capsys.readouterr().err
    assert not opened.generate.called


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


@pytest.mark.parametrize(("code", "timeout_s", "message"), cases(__file__, "servers that do not start"))
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
    assert main(["bench", "startup", "--command", "/no/such/program {port}"]) == 1
    assert capsys.readouterr().err == "penstock: [Errno 2] No such file or directory: '/no/such/program'\n"


IDS = PromptSource(1000)


def samples(*options: str, count: int = 50, source: PromptSource = IDS, seed: int = 0) -> list[Sample]:
    parser = argparse.ArgumentParser()
    add_options(parser, DatasetOptions)
    args = parser.parse_args(["--num-prompts", str(count), *options])
    args.seed = seed
    check_options(args, DatasetOptions)
    return DATASETS[args.dataset_name](args, source)


def test_a_range_ratio_spreads_lengths_to_both_sides() -> None:
    drawn = samples("--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.3", count=400)
    assert {sample.prompt_len for sample in drawn} == set(range(70, 131))
    assert {sample.output_len for sample in drawn} == set(range(7, 14))


@pytest.mark.parametrize("vocab_size", [2, 150, 50_000])
def test_token_ids_stay_inside_the_vocabulary(vocab_size: int) -> None:
    for sample in samples(count=10, source=PromptSource(vocab_size)):
        assert isinstance(sample.prompt, list)
        assert min(sample.prompt) >= 0 and max(sample.prompt) < vocab_size


def test_a_seed_repeats_the_prompts_and_a_longer_run_begins_with_them() -> None:
    assert samples(seed=4, count=20) == samples(seed=4, count=25)[:20] != samples(seed=5, count=20)


def test_a_few_prefixes_come_again_and_again() -> None:
    lengths = ("--random-prefix-len", "20", "--random-num-prefixes", "3", "--input-len", "5", "--output-len", "7")
    drawn = samples(*lengths, count=60)
    heads = Counter(tuple(sample.prompt[:20]) for sample in drawn)
    assert len(heads) == 3 and min(heads.values()) > 10
    assert {(len(sample.prompt), sample.prompt_len, sample.output_len) for sample in drawn} == {(25, 25, 7)}
    assert len({tuple(sample.prompt) for sample in drawn}) == 60


def test_conversations_give_their_first_question_and_the_length_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    skipped = [[4097, 40], [4096, 4097], [12, 40], [40, 12], [40]]
    lengths = [[13, 16], [4096, 4096, 7], *skipped]  # number of characters of each turn
    chats = [{"conversations": [{"from": "x", "value": "x" * length} for length in each]} for each in lengths]
    path.write_text(json.dumps(chats))
    options = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
    short, long = Sample("x" * 13, 4, 4), Sample("x" * 4096, 1024, 1024)
    drawn = {tuple(samples(*options, count=2, seed=seed)) for seed in range(20)}
    assert drawn == {(short, long), (long, short)}
    with pytest.raises(ConfigError, match=f"num_prompts: 3 given; {path} has 2 to use"):
        samples(*options, count=3)


def test_a_trace_keeps_its_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [(1000, 1200, 30, [0, 1, 2]), (3000, 1024, 4, [0, 1]), (3500, 600, 8, [0, 7])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    options = ("--dataset-name", "timed_trace", "--dataset-path", str(path))
    first, second, third = samples(*options, "--trace-speed", "2", count=3)
    assert [sample.arrival_s for sample in (first, second, third)] == [0.0, 1.0, 1.25]
    assert [(len(s.prompt), s.prompt_len, s.output_len) for s in (first, second)] == [(1200, 1200, 30), (1024, 1024, 4)]
    assert first.prompt[:1024] == second.prompt
    assert first.prompt[:512] == third.prompt[:512] and first.prompt[512] != third.prompt[512]  # a piece has 512 tokens
    small = samples(*options, "--trace-length-scale", "0.1", count=2)
    assert [(s.prompt_len, s.output_len) for s in small] == [(120, 3), (102, 1)]
    assert small[0].prompt[:102] == small[1].prompt


@pytest.mark.parametrize(("name", "content", "count", "message"), table(__file__, "datasets"))
def test_an_unusable_file_is_named(name: str, content: str | bytes, count: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        samples("--dataset-name", name, "--dataset-path", str(path), count=count)


def test_arrivals_are_a_poisson_process_of_an_exact_rate() -> None:
    times = arrival_times(20_000, 10.0, random.Random(1))
    assert times[-1] == pytest.approx(2000.0) and times == sorted(times) and times[0] > 0
    beyond = sum(later - earlier > 0.1 for earlier, later in pairwise([0.0, *times])) / 20_000
    assert beyond == pytest.approx(math.exp(-1), rel=0.05)
    assert times[:9] == arrival_times(20_000, 10.0, random.Random(1))[:9] != arrival_times(9, 5, random.Random(8))
