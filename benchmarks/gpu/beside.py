"""Measures requests through the whole engine on a GPU, beside vLLM or another checkout of Penstock: the same calls
through both `LLM` classes in one run, and a line of JSON for each figure.

    python -m benchmarks.gpu.beside --output DIR [--models qwen3-8b] [--figures answers]       this checkout alone
    python -m benchmarks.gpu.beside --output DIR --peer-path SITE [--figures steps,prompts]
    python -m benchmarks.gpu.beside --output DIR --peer-tree CHECKOUT
    python -m benchmarks.gpu.beside --output DIR --peer-python PYTHON --device cpu --tiny     (a rehearsal)

SITE is a folder with vLLM and what it needs beside this Python's packages; PYTHON an interpreter that has it. Both sides
have random weights in bfloat16, no prefix cache, 256 requests at once and 8,192 tokens a step; vLLM compiles and
captures whole graphs, which is its best. If both fit into the card's memory they take turns, otherwise they run one
after the other, and the line says which. DIR/beside.jsonl gets a line as soon as a figure is known, so that little is
lost when the time is over. `agreement` asks both sides for the greedy tokens of a small model in float32 and compares
them with transformers'.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pairs
from benchmarks.gpu import machine
from benchmarks.gpu.shapes import config_of, model_folder

Ask = Callable[[Any], float]  # a question of offline_job.py → seconds
MAX_MODEL_LEN, MAX_SEQS = 4096, 256
OTHERS = ("starts", "agreement")  # figures that are no workload
AGREED = 32  # tokens of an answer that are compared


class Figure(NamedTuple):
    """A workload and its unit; more is better where the unit is a rate."""

    name: str
    unit: str
    value: Callable[[Ask], float]


class Side(NamedTuple):
    """An engine, and the interpreter and environment in which it runs."""

    engine: str
    python: str
    env: Mapping[str, str]

    def open(self, job: Mapping[str, Any]) -> pairs.Asked:
        script = str(pairs.HERE / "offline_job.py")
        return pairs.Asked(self.python, script, json.dumps({**job, "engine": self.engine}), env=self.env)

    def version(self) -> str:
        """Return the version of the engine, or the revision of a checkout."""
        if self.engine == "penstock":
            return f"penstock {pairs.commit(Path(self.env['PYTHONPATH'].split(os.pathsep)[1]))}"
        code = "import vllm; print('vllm', vllm.__version__)"
        words = [self.python, "-c", code]
        return subprocess.run(words, env=self.env, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def step(rows: int, position: int, steps: int) -> Callable[[Ask], float]:
    """Return a workload: milliseconds of a step in which `rows` requests are around a position, as the difference of
    two calls, of which one generates a single token."""

    def value(ask: Ask) -> float:
        length = position - steps // 2
        first_s = ask([rows, length, 1])
        return (ask([rows, length, 1 + steps]) - first_s) / steps * 1e3

    return value


def tokens_per_s(rows: int, length: int, answer: int) -> Callable[[Ask], float]:
    return lambda ask: rows * answer / ask([rows, length, answer])


def prompt_ms(length: int) -> Callable[[Ask], float]:
    return lambda ask: ask([1, length, 1]) * 1e3


def mixed_lengths(ask: Ask) -> float:
    """Run the workload of nano-vllm's bench.py: 256 prompts and answers of 100 to 1,024 tokens, sampled."""
    rng = random.Random(0)
    # Its prompts are drawn token by token, and the lengths of the answers after them.
    inputs = [len([rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]) for _ in range(MAX_SEQS)]
    outputs = [rng.randint(100, 1024) for _ in range(MAX_SEQS)]
    return sum(outputs) / ask({"inputs": inputs, "outputs": outputs, "temperature": 0.6})


def figures(is_tiny: bool) -> dict[str, list[Figure]]:
    """Return the workloads of each group, the first ones first."""
    rows, position, steps = ((1, 3), 24, 8) if is_tiny else ((1, 32, MAX_SEQS), 1024, 256)
    decoding = [Figure(f"step of {num} at {position}", "ms", step(num, position, steps)) for num in rows]
    if is_tiny:
        return {"steps": decoding, "prompts": [Figure("prompt of 64", "ms", prompt_ms(64))]}
    answers = [Figure(f"{num} × 128 in / 512 out", "tok/s", tokens_per_s(num, 128, 512)) for num in (1, 16, 64, 256)]
    return {
        "steps": decoding,
        "prompts": [Figure(f"prompt of {length}", "ms", prompt_ms(length)) for length in (512, 2000)],
        "answers": [*answers, Figure("256 × 1,500 in / 150 out", "tok/s", tokens_per_s(MAX_SEQS, 1500, 150))],
        "mixed": [Figure("nano-vllm's benchmark", "tok/s", mixed_lengths)],
    }


def main() -> None:
    args = read_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    for end in (signal.SIGTERM, signal.SIGALRM):  # so that both engines end with this process
        signal.signal(end, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))
    signal.alarm(args.limit)
    for problem in machine.prepare():
        print(problem)
    with tempfile.TemporaryDirectory() as work:
        sides = {"ours": Side("penstock", sys.executable, machine.environment())}
        if args.peer_path or args.peer_python or args.peer_tree:
            sides["theirs"] = peer_of(args, work)
        conditions = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m benchmarks.gpu.beside", *sys.argv[1:]]),
            "machine": pairs.machine() | {"device": card(args.device)[0]},
            "versions": {name: side.version() for name, side in sides.items()},
        }
        record = partial(write_line, args.output / "beside.jsonl", conditions)
        for model in args.models:
            compare(model, sides, args, record)
            if "starts" in args.figures:
                starts(model, sides, args, partial(record, model=model))
        if "agreement" in args.figures:
            record("agreement", **agreement(sides, args, Path(work)))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = [*figures(is_tiny=False), *OTHERS]
    parser.add_argument("--output", type=Path, required=True, help="folder of the lines; made if it is not there")
    parser.add_argument("--peer-path", help="folder with vLLM's packages")
    parser.add_argument("--peer-python", help="interpreter of the peer (default: this one)")
    parser.add_argument("--peer-tree", type=Path, help="another checkout of Penstock, instead of vLLM")
    parser.add_argument("--models", type=words, default="qwen3-0.6b,qwen3-8b", help="shapes, separated by commas")
    parser.add_argument("--figures", type=words, default="steps,agreement", help=", ".join(groups))
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each figure and side (3)")
    parser.add_argument("--limit", type=int, default=570, help="seconds after which all ends (570; 0: never)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    args = parser.parse_args()
    if unknown := set(args.figures) - set(groups):
        parser.error(f"--figures: {', '.join(sorted(unknown))} given; there are {', '.join(groups)}")
    return args


def words(text: str) -> list[str]:
    return text.split(",")


def peer_of(args: argparse.Namespace, work: str) -> Side:
    """Return the other side. vLLM keeps its compiled code in the folder `work`."""
    if args.peer_tree is not None:
        environment = machine.environment()
        carried = environment["PYTHONPATH"].split(os.pathsep)[2:]
        tree = args.peer_tree.resolve()
        paths = [str(tree / "src"), str(tree), *carried]
        return Side(
            "penstock", args.peer_python or sys.executable, environment | {"PYTHONPATH": os.pathsep.join(paths)}
        )
    env = os.environ | {"VLLM_CACHE_ROOT": f"{work}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{work}/inductor"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop("PYTHONPATH", None)
    return Side(
        "vllm", args.peer_python or sys.executable, env | ({"PYTHONPATH": args.peer_path} if args.peer_path else {})
    )


def options_of(side: Side, args: argparse.Namespace, share: float) -> dict[str, Any]:
    """Return the arguments of `LLM` with which a side is at its best, with a share of the card's memory."""
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "load_format": "dummy", "enable_prefix_caching": False}
    options |= {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 8192, "dtype": "bfloat16"}
    if args.tiny:
        options |= {"max_model_len": 256, "max_num_seqs": 8}
    if side.engine == "vllm":
        options["generation_config"] = "vllm"
    if args.device == "cuda":
        options["gpu_memory_utilization"] = share
    elif side.engine == "penstock":
        options["kv_cache_bytes"] = 1 << 28
    return options


def card(device: str) -> tuple[str, float]:
    """Return the name of the device and its GiB of memory."""
    if device == "cpu":
        return "cpu", 0.0
    import torch

    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory / 2**30


def compare(model: str, sides: Mapping[str, Side], args: argparse.Namespace, record: Callable[..., None]) -> None:
    """Measure the figures of one model on both sides."""
    config = config_of(model, args.tiny)
    chosen = [each for group, all_of in figures(args.tiny).items() if group in args.figures for each in all_of]
    is_small = config["hidden_size"] <= 1024
    takes_turns = args.device == "cpu" or card(args.device)[1] > (75 if is_small else 130)
    share = 0.45 if takes_turns else 0.85
    with model_folder(config) as folder, contextlib.ExitStack() as stack:

        def opened(name: str) -> pairs.Asked:
            side = sides[name]
            job = {"model": folder, "vocab_size": config["vocab_size"], "options": options_of(side, args, share)}
            asked = side.open(job)
            asked.ask([2, 64, 8])  # compiles what is left
            return asked

        note = partial(record, model=model, order="by turns" if takes_turns else "one after the other")
        if takes_turns:
            both = {name: stack.enter_context(opened(name)) for name in sides}
            for figure in chosen:
                asks = {name: partial(measured, figure, each) for name, each in both.items()}
                note_figure(note, figure, pairs.rounds(asks, args.pairs))
            return
        samples: dict[str, dict[str, list[float]]] = {figure.name: {} for figure in chosen}
        for name in sides:
            with opened(name) as asked:
                for figure in chosen:
                    samples[figure.name][name] = [measured(figure, asked) for _ in range(args.pairs)]
                    note(f"{figure.name}, {name}", unit=figure.unit, samples=samples[figure.name][name])
        for figure in chosen:
            note_figure(note, figure, samples[figure.name])


def measured(figure: Figure, engine: pairs.Asked) -> float:
    return figure.value(engine.ask)


def note_figure(note: Callable[..., None], figure: Figure, samples: Mapping[str, list[float]]) -> None:
    verdict = pairs.summary(figure.name, samples, figure.unit) if len(samples) > 1 else {}
    note(figure.name, unit=figure.unit, samples=samples, **verdict)


def starts(model: str, sides: Mapping[str, Side], args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Measure how long each side takes to become ready, with empty caches and once more."""
    with model_folder(config_of(model, args.tiny)) as folder:
        for name, side in sides.items():
            with tempfile.TemporaryDirectory() as caches:
                kinds = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
                apart = side._replace(env={**side.env, **{kind: f"{caches}/{kind}" for kind in kinds}})
                for state in ("cold", "warm"):
                    job = {"model": folder, "options": options_of(side, args, share=0.85)}
                    with apart.open(job) as asked:
                        note(f"{state} start, {name}", unit="s", samples=asked.started)


def agreement(sides: Mapping[str, Side], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return how many of the greedy answers of each side are transformers'; the model is small and in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config, folder = config_of("qwen3-0.6b", is_tiny=True), work / "small"
    with model_folder(config) as written:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(written), dtype=torch.float32).eval()
    model.save_pretrained(folder)
    prompts = [random.Random(seed).choices(range(config["vocab_size"]), k=20 + seed) for seed in range(8)]
    expected = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=AGREED, min_new_tokens=AGREED, do_sample=False)
        expected.append(ids[0, len(prompt) :].tolist())
    found = {}
    for name, side in sides.items():
        options = options_of(side, args, share=0.2) | {"dtype": "float32", "load_format": "auto", "max_model_len": 256}
        job = {"model": str(folder), "options": options, "max_tokens": AGREED, "ends": []}
        with side.open(job) as asked:
            answers = asked.ask(prompts)
        found[name] = sum(answer == right for answer, right in zip(answers, expected, strict=True))
    return {"unit": f"of {len(prompts)} answers equal transformers'", "samples": found}


def write_line(path: Path, conditions: Mapping[str, Any], name: str, **values: Any) -> None:
    line = json.dumps({"figure": name, **values, **conditions}, ensure_ascii=False)
    print(line, flush=True)
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
