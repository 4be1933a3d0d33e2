"""A GGUF file computed by Penstock and by llama.cpp, by turns: tokens a second of one row and of several, of a prompt, and
the seconds from a start to the first token.

llama.cpp is measured by its own `llama-bench` and `llama-batched-bench`, which have no tokenizer, sampler or scheduler to
run; Penstock by `LLM.generate`, greedy, which has all but the tokenizer. Neither may reuse a prompt.

    bench_gguf.py --programs DIRECTORY --models FILE...     the directory of llama.cpp's programs, and .gguf files
"""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pairs import ROOT, main, rounds, summary

ROWS = (1, 8, 16)
PROMPT, ANSWER, LONG_PROMPT = 32, 64, 512
ONE_TOKEN = """
import sys
from penstock import LLM, SamplingParams
LLM(sys.argv[1], skip_tokenizer=True).generate([[5, 6]], SamplingParams(max_tokens=1))
"""


class Ours:
    def __init__(self, model: str) -> None:
        import penstock.executor.uniproc  # noqa: F401 (with torch: not memory that the model takes)
        from penstock import LLM

        self._model, self._rng = model, random.Random(0)
        before = _resident_mib()
        self._llm = LLM(
            model, max_num_seqs=max(ROWS), max_model_len=1024, enable_prefix_caching=False, skip_tokenizer=True
        )
        self.memory_mib = _resident_mib() - before

    def close(self) -> None:
        self._llm.shutdown()

    def decode(self, num_rows: int) -> float:
        longer, first = self._seconds(num_rows, PROMPT, ANSWER + 1), self._seconds(num_rows, PROMPT, 1)
        return num_rows * ANSWER / (longer - first)

    def prefill(self) -> float:
        return LONG_PROMPT / self._seconds(1, LONG_PROMPT, 1)

    def start(self) -> float:
        return _seconds_of([sys.executable, "-c", ONE_TOKEN, self._model], PYTHONPATH=str(ROOT / "src"))

    def _seconds(self, num_rows: int, length: int, max_tokens: int) -> float:
        from penstock import SamplingParams

        prompts: list[Any] = [self._rng.choices(range(100, 10_000), k=length) for _ in range(num_rows)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started


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
        ours, llama = Ours(file), Llama(programs, file, threads)
        size_mib = Path(file).stat().st_size / 2**20
        print(f"{Path(file).name}: {size_mib:,.0f} MiB, in memory after load {ours.memory_mib:,.0f} MiB")
        found = {}
        for rows in ROWS:
            sides = {"penstock": partial(ours.decode, rows), "llama.cpp": partial(llama.decode, rows)}
            found[f"{rows} rows"] = summary(f"{rows} rows", rounds(sides, pairs), "tokens/s")
        sides = {"penstock": ours.prefill, "llama.cpp": llama.prefill}
        found["prompt"] = summary(f"a prompt of {LONG_PROMPT}", rounds(sides, pairs), "tokens/s")
        sides = {"penstock": ours.start, "llama.cpp": llama.start}
        found["start"] = summary("start to first token", rounds(sides, 2), "s")
        figures[Path(file).name] = found | {"memory_mib": ours.memory_mib, "file_mib": size_mib}
        ours.close()
    return figures


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _seconds_of(command: list[str], **environment: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=os.environ | environment)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(__doc__, "gguf", gguf)
