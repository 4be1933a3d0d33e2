"""A GGUF file computed by Penstock and by llama.cpp, by turns: tokens per second of one and of several rows and of a
prompt, and the seconds from start to first token.

llama.cpp is measured by its own `llama-bench` and `llama-batched-bench`, which run no tokenizer, sampler or scheduler;
Penstock by greedy `LLM.generate`, which runs all but the tokenizer. Neither may reuse a prompt.

    bench_gguf.py --programs DIRECTORY --models FILE...     the directory of llama.cpp's programs, and .gguf files
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pairs import HERE, ROOT, Asked, main, rounds, summary
from peers import Batch

ROWS = (1, 8, 16)
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
PROMPT, ANSWER, LONG_PROMPT = 32, 64, 512
ONE_TOKEN = """
import sys
from penstock import LLM, SamplingParams
LLM(sys.argv[1], skip_tokenizer=True).generate([[5, 6]], SamplingParams(max_tokens=1))
"""


def ours_of(model: str) -> Asked:
    """Start a process that runs batches with Penstock."""
    options = {"max_num_seqs": max(ROWS), "max_model_len": 1024, "enable_prefix_caching": False}
    job = {"engine": "penstock", "model": model, "vocab_size": 10_000, "options": options}
    return Asked(sys.executable, str(HERE / "offline_job.py"), json.dumps(job), env=ENVIRONMENT)


class Llama:
    def __init__(self, directory: str, model: str, threads: int) -> None:
        self._directory, self._model, self._threads = Path(directory), model, str(threads)

    def decode(self, num_rows: int) -> float:
        if num_rows == 1:
            return self._bench("-p", "0", "-n", str(ANSWER))
        lengths = ["-npp", str(PROMPT), "-ntg", str(ANSWER), "-npl", str(num_rows), "-c", "4096"]
        return float(self._run("llama-batched-bench", *lengths, "--output-format", "jsonl")["speed_tg"])

    def prefill(self) -> float:
        return self._bench("-p", str(LONG_PROMPT), "-n", "0")

    def start(self) -> float:
        lengths = ["-npp", "4", "-ntg", "1", "-npl", "1", "-c", "64"]
        return _seconds_of(
            [str(self._directory / "llama-batched-bench"), "-m", self._model, "-t", self._threads, *lengths]
        )

    def _bench(self, *lengths: str) -> float:
        return float(self._run("llama-bench", *lengths, "-r", "2", "-o", "jsonl")["avg_ts"])

    def _run(self, program: str, *arguments: str) -> Any:
        command = [str(self._directory / program), "-m", self._model, "-t", self._threads, *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])


def gguf(programs: str = "", models: list[str] = ["MODEL.gguf"], pairs: int = 4, threads: int = 2) -> dict[str, Any]:  # noqa: B006
    figures = {}
    for file in models:
        llama, found = Llama(programs, file, threads), {}
        print(f"{Path(file).name}: {Path(file).stat().st_size / 2**20:,.0f} MiB")
        with ours_of(file) as ours:
            for rows in ROWS:
                batch = Batch(file, rows, PROMPT, ANSWER + 1, "decode")
                sides = {"penstock": partial(batch.value, ours.ask), "llama.cpp": partial(llama.decode, rows)}
                found[f"{rows} rows"] = summary(f"{rows} rows", rounds(sides, pairs), "tokens/s")
            batch = Batch(file, 1, LONG_PROMPT, 1, "prefill")
            sides = {"penstock": partial(batch.value, ours.ask), "llama.cpp": llama.prefill}
            found["prompt"] = summary(f"a prompt of {LONG_PROMPT}", rounds(sides, pairs), "tokens/s")
        sides = {"penstock": partial(_seconds_of, [sys.executable, "-c", ONE_TOKEN, file]), "llama.cpp": llama.start}
        found["start"] = summary("start to first token", rounds(sides, 2), "s")
        figures[Path(file).name] = found
    return figures


def _seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(__doc__, "gguf", gguf)
