"""Whole models on a pretended GPU, which detects accesses that nothing puts into order; and the detector itself.

The same worlds run on a real GPU, where only wrong tokens would show.
"""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.engine.config import SchedulerConfig
from penstock.engine.grammar.matcher import Matcher
from penstock.executor import outbox
from penstock.executor.models.weights import Weights
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.protocol import Sampling, Step, StepResult
from penstock.executor.sampling.edits import RowMasks
from penstock.executor.sampling.sampler import SampledTokens, Sampler
from penstock.executor.staging import send, send_list
from penstock.executor.step import warmup
from penstock.executor.step.graphs import CudaGraphs
from penstock.executor.tiers.cuda_copies import CudaCopier
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_sampler import admit
from tests.support.checkpoints import executor_of
from tests.support.pretended_gpu import PretendedGpu
from tests.support.pretended_memory import CPU, GPU
from tests.support.races import Race
from tests.support.refusals import cases, hardest
from tests.support.simulation import Simulation, submit
from tests.support.small_models import folder, greedy
from tests.support.twins import sampling as sampling_twin

CASE = "qwen3"
OPTION_DTYPES = (*[torch.float32] * 2, torch.int32, torch.float32, *[torch.int64] * 2)  # of `SamplingOps.choose`


def open_executor(monkeypatch: pytest.MonkeyPatch | None = None, **options: Any) -> UniprocExecutor:
    """Open a model on a GPU; on the pretended one, with parts of the start left out, if there is something to patch."""
    if monkeypatch is not None:
        # The warm-up takes as long as a test, and nothing is in flight yet.
        monkeypatch.setattr("penstock.executor.ranks.rank_builder.warm_up", lambda *_: None)
        monkeypatch.setattr(Weights, "layers", lambda _, num_layers, build: [build(i) for i in range(num_layers)])
    limits = {"kv_cache_bytes": 2**17, "block_size": 4, "max_num_seqs": 6, "max_model_len": 80}
    return executor_of(CASE, device="cuda", **limits, **options)


SAMPLINGS = cases(__file__, "samplings of a watched world", Sampling=Sampling)


class Loose:
    """A grammar that forbids nothing, and forces two tokens now and then."""

    error, is_complete = "", False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def advance(self, tokens: list[int]) -> bool:
        return True

    def forced(self) -> list[int]:
        return self._rng.choices(range(160), k=2) if self._rng.random() < 0.2 else []


class World(Simulation):
    """The scheduler with requests of every kind that come, go and are aborted, two steps in flight.

    When a request has ended, its tokens on the host must be those of the device's table, and a greedy one must have the
    tokens of transformers."""

    def __init__(
        self,
        executor: UniprocExecutor,
        samplings: list[Sampling],
        is_mixed: bool,
        finishing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`finishing`: the context in which a step is finished; another thread does that, where there is one."""
        self._samplings, self._is_mixed, self._rng = samplings, is_mixed, random.Random(1)
        self._prompts = [self._rng.choices(range(160), k=40) for _ in range(3)]
        self._table = executor._rank.runner._inputs.tokens
        self.counts: Counter[str] = Counter()
        submit_step, collect = executor.submit, executor.collect

        def send(step: Step) -> None:
            submit_step(step)
            if masked := [index for index, row in enumerate(step.rows) if row.masked]:
                words = np.full((len(masked), 160 // 32), 0x0F0F0F0F, np.int32)
                executor.set_masks(step.step_id, np.array(masked, np.int32), words)
            if step.transfers is not None:
                self.counts.update(saved=len(step.transfers.saves), restored=len(step.transfers.restores))

        def finish() -> StepResult:
            with finishing():
                return collect()

        executor.submit, executor.collect = send, finish  # type: ignore[method-assign]
        super().__init__(executor, SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40))

    def live(self, num_steps: int) -> None:
        """Run prompts one after the other, the first once more when it is on the host alone; then many at once."""
        for number in range(4):
            self.submit(submit(f"first{number}", self._prompts[number % 3], 2, sampling=SAMPLINGS[0]))
            while self.scheduler.has_work():
                self._watch()
        for number in range(num_steps):
            if self._rng.random() < 0.4:
                self._come(f"r{number}", self._rng.randint(1, min(25, num_steps)))
            if self.scheduler.running and self._rng.random() < 0.2:
                self.counts["aborted"] += 1
                self.abort(self._rng.choice(list(self.scheduler.running)).message.request_id)
            self._watch()
        while self.scheduler.has_work():
            self._watch()

    def _come(self, name: str, max_tokens: int) -> None:
        prompt = self._rng.choice(self._prompts)[: self._rng.randint(2, 40)]
        kind = self._rng.random() if self._is_mixed else 1.0
        pooling = None if kind > 0.15 else "mean" if kind > 0.07 else "last"
        sampling = SAMPLINGS[0] if pooling else self._rng.choice(self._samplings)
        message = submit(name, prompt, max_tokens, sampling=sampling, pooling=pooling)
        self.outputs[name] = []
        matcher = cast(Matcher, Loose(self._rng)) if 0.15 < kind < 0.3 else None
        self.scheduler.submit(message, matcher)

    def _watch(self) -> None:
        slots = {request: request.slot for request in self.scheduler.running}
        self.step()
        for request, slot in slots.items():
            message, tokens = request.message, request.tokens.tolist()
            if not request.finished or message.pooling or self.last(message.request_id).finish_reason == "abort":
                continue
            self.counts["over"] += 1
            on_device = self._table[slot, : len(tokens)].cpu().tolist()
            assert on_device == tokens, f"{message.request_id} has other tokens on the device"
            if message.sampling == SAMPLINGS[0] and request.matcher is None:
                prompt, output = tokens[: request.num_prompt], tokens[request.num_prompt :]
                assert output == greedy(CASE, prompt, len(output))[0]


KINDS: dict[str, tuple[bool, dict[str, Any]]] = dict(cases(__file__, "kinds of watched worlds"))


@pytest.mark.parametrize(
    ("kind", "num_steps"), [("mixed", 6), *(pytest.param(kind, 40, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_two_steps_in_flight_do_not_race(kind: str, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread finishes the steps, and may lag behind: this one waits for nothing that the other one does."""
    is_mixed, options = KINDS[kind]
    folder(CASE)
    with PretendedGpu() as gpu:
        executor = open_executor(monkeypatch, **options)
        samplings = SAMPLINGS if is_mixed else SAMPLINGS[:2]
        world = World(executor, samplings, is_mixed, lambda: gpu.thread("the finisher"))
        world.live(num_steps)
        executor.close()
    assert world.counts["over"] and world.counts["aborted"]
    if "kv_host_bytes" in options:
        assert world.counts["saved"] > 10 and world.counts["restored"]
    if "enforce_eager" not in options:
        assert sum(graph.num_replays for graph in gpu.graphs) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_two_steps_in_flight_leave_the_tokens_of_the_table(kind: str) -> None:
    is_mixed, options = KINDS[kind]
    executor = open_executor(**options)
    World(executor, SAMPLINGS if is_mixed else SAMPLINGS[:2], is_mixed).live(2000)
    executor.close()


def _forget_the_second_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward pass write where the last draw's tokens still wait to be copied."""
    monkeypatch.setattr("penstock.executor.ranks.runner_factory.CudaGraphs", functools.cache(CudaGraphs))


def _forget_the_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CudaCopier.begin_step

    def begin_step(copier: CudaCopier, written: list[int]) -> None:
        copier._restored = None
        begin(copier, written)

    monkeypatch.setattr(CudaCopier, "begin_step", begin_step)


def _forget_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that is being sent be reused at once."""
    monkeypatch.setattr(outbox, "HostCopy", lambda _, copies, event: HostCopy((), copies, event))
    monkeypatch.setattr(SampledTokens, "post", lambda sampled, to: _post_copies(sampled, to))


def _post_copies(sampled: SampledTokens, to: Outbox) -> None:
    sampled._host_copy = to.send([sampled.tokens.clone(), sampled._largest.clone()])


FORGOTTEN = dict(cases(__file__, "forgotten waits", **globals()))


@pytest.mark.parametrize("wait", hardest(FORGOTTEN, "to wait for restores"))
def test_a_forgotten_wait_is_detected(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, forget, message = FORGOTTEN[wait]
    _, options = KINDS[kind]
    folder(CASE)
    with PretendedGpu() as gpu:
        forget(monkeypatch)
        world = World(open_executor(monkeypatch, **options), SAMPLINGS[:2], False, lambda: gpu.thread("another"))
        with pytest.raises(Race, match=message):
            world.live(50)


def test_options_of_requests_are_copied_from_pinned_memory_without_a_wait(gpu: PretendedGpu) -> None:
    sampler = Sampler(512, len(warmup.SAMPLINGS), GPU, sampling_twin)
    gpu.copies.clear()  # what was allocated once
    admitted = [admit(sampler, slot, sampling, [*range(7)], 4) for slot, sampling in enumerate(warmup.SAMPLINGS)]
    sampler.extend(admitted[3], (1, 2))
    counts = []
    for step in range(3):
        requests = admitted[: len(warmup.SAMPLINGS) - (step == 2)]
        options = [torch.ones(len(requests), dtype=dtype, device=GPU) for dtype in OPTION_DTYPES]
        masks = RowMasks([0, 2], np.full((2, 512 // 32), -1, np.int32)) if step else None
        logits = torch.zeros(len(requests), 512, device=GPU)
        sampler.start(logits, requests, np.full(len(requests), 8 + step), masks, options)
        counts.append(len(gpu.copies))
    assert all(gpu.copies)
    assert counts[1] - counts[0] == 2  # the same requests again: only the masks and their rows
    assert counts[2] - counts[1] > counts[1] - counts[0]


def test_a_copy_from_ordinary_memory_is_detected_and_a_cpu_copies_nothing(gpu: PretendedGpu) -> None:
    send_list([1, 2], torch.int64, GPU)
    torch.tensor([1, 2]).to(GPU, non_blocking=True)
    torch.tensor([1, 2]).pin_memory().to(GPU)
    assert gpu.copies == [True, False, False]
    array = np.arange(3)
    assert send(array, CPU).data_ptr() == array.ctypes.data
    assert send_list([1, 2], torch.int64, CPU).tolist() == [1, 2] and len(gpu.copies) == 3
