"""Measures for how many tokens greedy answers equal those of float32, for several ways to compute the default model.

    python benchmarks/bench_agreement.py --prompts FILE... [--count 200] [--max-tokens 128] [--llama PYTHON]

FILE has a line of JSON for each prompt: its `prompt`, `question` or first of its `turns`; all files contribute equally,
if they are long enough. All sides get the same ids, with the chat template. The reference is Penstock in float32 with
the default model's file (GGUF, Q4_1). PYTHON is an interpreter with llama.cpp's binding (llama-cpp-python). Nothing is
timed, so the machine may be busy.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from pairs import HERE, Asked, main, table

from penstock import LLM
from penstock.engine.model_files import resolve_model

MAX_MODEL_LEN = 2048
Ids = list[int]


def texts_of(paths: list[str], count: int) -> list[str]:
    """Return the prompts of the files, the shortest file first, so that longer files make up for what it lacks."""
    files = sorted((Path(path).read_text().splitlines() for path in paths), key=len)
    found: list[str] = []
    for number, lines in enumerate(files):
        values = map(json.loads, lines[: (count - len(found)) // (len(files) - number)])
        found += [value.get("prompt") or value.get("question") or value["turns"][0] for value in values]
    return found


def agreement(reference: list[Ids], answers: list[Ids]) -> list[int]:
    """Return the number of leading tokens each answer shares with its reference; -1 if they are equal to the end."""
    lengths = []
    for right, answer in zip(reference, answers, strict=True):
        same = [a == b for a, b in zip(right, answer, strict=False)]
        lengths.append(-1 if right == answer else [*same, False].index(False))
    return lengths


def line(name: str, lengths: list[int], max_tokens: int) -> dict[str, Any]:
    quartiles = statistics.quantiles([max_tokens if each < 0 else each for each in lengths], n=4)
    named = zip(("lower quartile", "median", "upper quartile"), quartiles, strict=True)
    return {"computed with": name, "of": len(lengths), "identical": lengths.count(-1), **dict(named)}


def run(
    prompts: list[str] = [""],  # noqa: B006
    count: int = 200,
    max_tokens: int = 128,
    llama: str | None = None,
) -> dict[str, Any]:
    with LLM() as llm:
        tokenizer, ends = llm.get_tokenizer(), sorted(llm.tokenizer.eos_ids)
    chats = [[{"role": "user", "content": text}] for text in texts_of(prompts, count)]
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    model, longest = resolve_model().path, {"max_model_len": MAX_MODEL_LEN}
    job = {"max_tokens": max_tokens, "ends": ends}

    def answers(python: str, engine: str, options: dict[str, Any]) -> list[Ids]:
        given = json.dumps(job | {"engine": engine, "model": str(model), "options": options})
        with Asked(python, str(HERE / "offline_job.py"), given) as worker:
            return worker.ask(asked)  # type: ignore[no-any-return]

    ways: dict[str, tuple[str, str, dict[str, Any]]] = {
        "penstock": (sys.executable, "penstock", longest),
        "penstock, bfloat16": (sys.executable, "penstock", longest | {"dtype": "bfloat16"}),
    }
    if llama:
        ways["llama.cpp"] = (llama, "llama.cpp", {"n_ctx": MAX_MODEL_LEN, "n_threads": 2})
    reference = answers(sys.executable, "penstock", longest | {"dtype": "float32"})
    lengths = {name: agreement(reference, answers(*way)) for name, way in ways.items()}
    table([line(name, found, max_tokens) for name, found in lengths.items()])
    return {"tokens": max_tokens, "lengths": lengths}


if __name__ == "__main__":
    main(__doc__, "agreement", run)
