"""Graphs with two steps in flight: do the host and the device hold the same tokens, and are they the eager ones?

    python -m benchmarks.gpu graph_part '{"device": "cuda", "tiny": false, "dependent": false}'

Steps overlap only on a GPU, and only with two of them in flight: what the host gets of step N is copied while step
N + 1 computes, beside the tiers' copies, which here leave the way to the host no pause. Thousands of steps, whose number
of rows drifts, are played three times: from graphs, from graphs beside copies, and one by one without graphs. The
device's table is the truth for the first two, exactly; the third may differ from them by near ties alone.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from benchmarks.gpu.batches import fill
from benchmarks.gpu.figures import open_device, report, set_launch
from benchmarks.gpu.shapes import config_of, model_folder
from benchmarks.gpu.traffic import Planned, Traffic

from penstock.executor.protocol import Executor, ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor

Answers = dict[int, list[int]]  # request → what the host was sent of its samples
MAX_SHOWN = 5


class Size(NamedTuple):
    layers: int
    slots: int
    longest: int  # request
    steps: int
    copies: int  # blocks each way beside every step
    kv_bytes: int
    vocab_size: int


REAL, TINY = Size(4, 48, 160, 2000, 64, 1 << 29, 32_000), Size(2, 8, 60, 120, 3, 1 << 20, 512)
DIVERGED = 0.02  # of the requests, from where on it is no matter of near ties any more


def main(job: dict[str, Any]) -> None:
    device = open_device(job)
    set_launch(job)
    size = TINY if job["tiny"] else REAL
    for model, steps in (("qwen3-0.6b", size.steps), ("deepseek-v2-lite", size.steps // 4)):
        compare(model, device, size._replace(steps=steps), job["tiny"])


def compare(model: str, device: torch.device, size: Size, is_tiny: bool) -> None:
    found = {}
    for name, eager, copies in (("graphs", False, 0), ("graphs beside copies", False, size.copies), ("eager", True, 0)):
        with opened(model, device, size, is_tiny, eager) as executor:
            kept = fill_reserved(executor, size)
            traffic = Traffic(executor.info, size.slots, reserved(executor, size), size.longest)
            started_s = time.monotonic()
            found[name] = answers, wrong = play(
                executor, traffic.steps(size.steps, copies), traffic, 1 if eager else executor.info.max_in_flight
            )
            damaged = num_damaged(executor, size, kept) if copies else 0
            report(
                f"{model}: {name}",
                ok=not wrong and not damaged,
                steps=size.steps,
                seconds=time.monotonic() - started_s,
                requests=len(answers),
                tokens=sum(map(len, answers.values())),
                host_differs=len(wrong),
                first=wrong[:MAX_SHOWN],
                damaged_blocks=damaged,
            )
    expected = found["eager"][0]
    for name in ("graphs", "graphs beside copies"):
        differing = diverged(found[name][0], expected)
        report(
            f"{model}: {name} and eager",
            ok=len(differing) <= DIVERGED * len(expected),
            requests=len(expected),
            diverged=len(differing),
            first=differing[:MAX_SHOWN],
        )


@contextmanager
def opened(model: str, device: torch.device, size: Size, is_tiny: bool, eager: bool) -> Iterator[Executor]:
    """An executor of the model's shape with few layers, made-up weights and a host tier. On a CPU graphs are made up."""
    config = config_of(model, is_tiny) | {"num_hidden_layers": size.layers, "vocab_size": size.vocab_size}
    if "n_routed_experts" in config:
        config["n_routed_experts"] //= 4  # they are made on the host, three times
    with model_folder(config) as folder, ExitStack() as stack:
        options = ExecutorConfig(
            model=folder,
            device=device.type,  # type: ignore[arg-type]
            # Rounding must not decide between tokens: buckets have other sums than the rows alone.
            dtype="float32",
            load_format="dummy",
            kv_cache_bytes=size.kv_bytes,
            kv_host_bytes=size.kv_bytes,
            max_num_seqs=size.slots,
            max_model_len=size.longest,
            block_size=16 if not is_tiny else 4,
            enforce_eager=eager,
        )
        if (
            device.type == "cpu"
        ):  # the tests' made-up graphs, and copies to the host as early as a stream would make them
            from tests.executor import test_graphs

            test_graphs.pretend_a_gpu(stack.enter_context(pytest.MonkeyPatch.context()), test_graphs.Recorder)
        executor = UniprocExecutor(options)
        stack.callback(executor.close)
        if device.type == "cpu":
            executor.info = msgspec.structs.replace(executor.info, max_in_flight=2)
        yield executor


def play(executor: Executor, steps: Iterable[Planned], traffic: Traffic, in_flight: int) -> tuple[Answers, list[Any]]:
    """What was sent to the host, and where the device's table has another token: request, place, sent, in the table."""
    answers: Answers = {}
    wrong: list[Any] = []
    unseen: set[int] = set()
    waiting: deque[Planned] = deque()

    def collect() -> None:
        planned = waiting.popleft()
        result = executor.collect()
        if result.errors:
            raise SystemExit(f"a row failed: {result.errors}")
        sampled = [token for token, row in zip(result.tokens, planned.step.rows, strict=True) if row.sample]
        for request_id, token in zip(planned.requests, sampled, strict=True):
            answers.setdefault(request_id, []).append(token)
            unseen.add(request_id)

    for planned in steps:
        while len(waiting) >= in_flight:
            collect()
        executor.submit(planned.step)
        waiting.append(planned)
        if planned.look:
            while waiting:
                collect()
            wrong += look(executor, {request_id: answers[request_id] for request_id in unseen}, traffic)
            unseen.clear()
    return answers, wrong


def look(executor: Executor, answers: Answers, traffic: Traffic) -> list[Any]:
    table = executor._runner._inputs.tokens.cpu()  # type: ignore[attr-defined]
    wrong = []
    for request_id, sent in sorted(answers.items()):
        slot, first = traffic.slots[request_id]
        held = table[slot, first : first + len(sent)].tolist()
        wrong += [
            [request_id, place, token, other]
            for place, (token, other) in enumerate(zip(sent, held, strict=True))
            if token != other
        ]
    return wrong


def diverged(answers: Answers, expected: Answers) -> list[Any]:
    """Request, and the first place where it went another way."""
    assert answers.keys() == expected.keys()
    return [
        [request_id, next(place for place, (a, b) in enumerate(zip(sent, answers[request_id], strict=True)) if a != b)]
        for request_id, sent in expected.items()
        if sent != answers[request_id]
    ]


def reserved(executor: Executor, size: Size) -> int:
    """The first block that is only copied: no row reads or writes it."""
    return executor.info.num_blocks - 2 * size.copies


def fill_reserved(executor: Executor, size: Size) -> torch.Tensor:
    kv: torch.Tensor = executor._rank.kv[reserved(executor, size) :]  # type: ignore[attr-defined]
    with torch.inference_mode():
        fill(kv)
    return kv[: size.copies].clone()


def num_damaged(executor: Executor, size: Size, kept: torch.Tensor) -> int:
    """Blocks that came back from the host other than they went there."""
    kv = executor._rank.kv[reserved(executor, size) :]  # type: ignore[attr-defined]
    same = [(part.flatten(1) == kept.flatten(1)).all(1) for part in (kv[: size.copies], kv[size.copies :])]
    return int((~torch.stack(same).all(0)).sum())
