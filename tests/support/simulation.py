"""The scheduler, or the engine core around it, stepped by hand over an executor, most often the oracle.

After every step all invariants are checked. A finished request is compared with the tokens that it gets alone with an
ample pool. Random requests are those of tests/engine/test_swarm.py.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from penstock.cache.tiers.base import Store
from penstock.engine.config import MAX_LAYER_DRAFTS, EngineConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core import process
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.tiers import Tiers
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.messages import FromCore, Output, Shutdown, Submit, ToCore
from penstock.executor.protocol import ExecutorConfig, GroupInfo, Sampling, Step, TokenLogprobs
from penstock.executor.tiers.open_tiers import ALIGNMENT
from tests.support.driver import Driver
from tests.support.flaky_store import FlakyStore
from tests.support.oracle import OracleExecutor

BLOCK_SIZE = 4


def submit(request_id: str, tokens: list[int], max_tokens: int = 8, **options: Any) -> Submit:
    sampling = options.pop("sampling", None) or Sampling(temperature=0.0, stop_ids=options.pop("stop_ids", ()))
    return Submit(request_id, np.array(tokens, "<i4").tobytes(), sampling, max_tokens, **options)


class Simulation:
    """A scheduler over any executor, stepped by hand, with all invariants checked. It keeps what each request was given."""

    step_s: float = 0.0  # how far the clock moves with a step
    now_s: float = 0.0

    def __init__(self, executor: Any, config: SchedulerConfig) -> None:
        self.executor = executor  # tests look into it
        self.outputs: dict[str, list[Output]] = {}
        self.scheduler = Scheduler(config, executor.info, lambda: self.now_s)
        self.target: Scheduler | EngineCore = self.scheduler  # what takes requests and aborts

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def last(self, request_id: str) -> Output:
        return self.outputs[request_id][-1]

    def num_cached(self, request_id: str) -> int:
        reuse = self.outputs[request_id][0].reuse
        return 0 if reuse is None else reuse.num_cached_tokens

    def end(self, request_id: str) -> str | None:
        return self.last(request_id).finish_reason if self.outputs[request_id] else None

    def keep(self, *outputs: Output | None) -> None:
        for output in filter(None, outputs):
            assert self.end(output.request_id) is None, f"{output.request_id}: an output after its end"
            self.outputs[output.request_id].append(output)
            if output.reuse is not None:
                assert min(output.reuse.cached.values()) >= 0

    def plan(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def submit(self, message: Submit) -> None:
        self.outputs[message.request_id] = []
        self.target.submit(message)

    def abort(self, request_id: str) -> None:
        self.keep(self.target.abort(request_id))

    def step(self, check: bool = True) -> None:
        """Fill the pipeline, take in one result."""
        self.now_s += self.step_s
        while len(self.scheduler.in_flight) < self.executor.info.max_in_flight:
            step = self.scheduler.schedule()
            if check:
                self.scheduler.check()
            if step is None:
                break
            self.executor.submit(step)
        if self.scheduler.in_flight:
            self.collect()
            if check:
                self.scheduler.check()
            return
        assert not self.scheduler.has_work(), "requests wait and nothing moves"

    def collect(self) -> None:
        """Take in the result of the oldest step in flight."""
        self.keep(*self.scheduler.apply(self.executor.collect()))

    def run_step(self) -> Step:
        """Plan a step, run it, and take in its result; nothing else is in flight."""
        step = self.plan()
        self.executor.submit(step)
        self.collect()
        self.scheduler.check()
        return step

    def run(self, check: bool = True, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.step(check)
        raise AssertionError(f"not finished after {limit} steps")

    def settle(self, limit: int = 1000) -> None:
        """Step until nothing is in flight between the tiers."""
        self.run()
        for _ in range(limit):
            if self.scheduler.tiers.is_idle:
                return
            self.step()
        raise AssertionError(f"transfers are still in flight after {limit} steps")


@dataclass
class World(Simulation):
    """A scheduler over an oracle, with a clock that moves by `step_s` per step."""

    num_blocks: int = 200
    max_in_flight: int = 2
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    vocab_size: int = 50
    max_model_len: int = 64
    patience_s: float = 1000.0
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0  # 0: no tiers
    store: FlakyStore | None = None  # beneath the host, as its disk
    drafts: SpeculativeConfig | None = None
    groups: Sequence[GroupInfo] = (GroupInfo(),)
    step_s: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # more options of the executor

    def __post_init__(self) -> None:
        executor = ExecutorConfig(
            max_model_len=self.max_model_len,
            block_size=BLOCK_SIZE,
            kv_cache_bytes=self.num_blocks * BLOCK_SIZE * 8,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_host_bytes=self.num_host_blocks * ALIGNMENT,
            hf_overrides={"vocab_size": self.vocab_size, "groups": list(self.groups)},
            **self.options,
        )
        stores: dict[str, Store] = {} if self.store is None else {"disk": cast(Store, self.store)}
        scheduler = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            patience_s=self.patience_s,
            enable_prefix_caching=self.enable_prefix_caching,
            speculative_config=self.drafts,
        )
        self.config = EngineConfig(executor=executor, scheduler=scheduler)
        super().__init__(OracleExecutor(executor, self.max_in_flight, stores), scheduler)

    @property
    def tiers(self) -> Tiers:
        assert isinstance(self.scheduler.tiers, Tiers)
        return self.scheduler.tiers

    @property
    def disk(self) -> FlakyStore:
        assert self.store is not None
        return self.store

    def cached(self, name: str, prompt: list[int], max_tokens: int = 3, **options: Any) -> int:
        """Run a request, check its tokens, and return how much of its prompt was found in the cache."""
        message = submit(name, prompt, max_tokens, **options)
        self.submit(message)
        self.settle()
        assert self.tokens(name) == alone(message, self.vocab_size, self.max_model_len, self.groups)[0]
        return self.num_cached(name)

    def churn(self, count: int = 12) -> None:
        """Run other prompts, until nothing of earlier ones is left on a small device."""
        for number in range(count):
            self.submit(submit(f"churn{len(self.outputs)}", [30 + number] * 21, max_tokens=1))
            self.settle()

    def compare(self, message: Submit, weights: Sequence[str | None] = (None,)) -> dict[str, int]:
        """Check that a request has ended with what it gets alone, or with the beginning of it if it was aborted.

        `weights` are the folders of the versions, each of which computes the tokens that name it. Return what happened."""
        name, last = message.request_id, self.last(message.request_id)
        num_tokens = 0
        for version, outputs in groupby(self.outputs[name], lambda output: output.weights_version):
            tokens = [token for output in outputs for token in output.tokens]
            begun = message.tokens + np.array(self.tokens(name)[:num_tokens], "<i4").tobytes()
            rest = msgspec.structs.replace(message, tokens=begun, max_tokens=message.max_tokens - num_tokens)
            expected, embedding, prompt_logprobs = alone(
                rest, self.vocab_size, self.max_model_len, self.groups, weights[version]
            )
            assert tokens == expected[: len(tokens)], f"request {name}, from token {num_tokens} on"
            if num_tokens == 0 and (tokens or last.finish_reason != "abort"):
                assert self.outputs[name][0].prompt_logprobs == prompt_logprobs, f"request {name}"
            num_tokens += len(tokens)
        if last.finish_reason == "abort":
            return {"aborted": 1}
        assert tokens == expected and last.embedding == embedding, f"request {name}"
        return {"finished": 1, "recomputed": int(last.weights_version != self.outputs[name][0].weights_version)}


@dataclass
class CoreRig(World):
    """An engine core over an oracle, stepped by hand; its invariants are checked after every step."""

    num_blocks: int = 400
    max_model_len: int = 128
    compiler: Compiler | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.core = self.target = EngineCore(self.config, self.executor, self.compiler, clock=lambda: self.now_s)
        self.scheduler = self.core.scheduler
        submit_step = self.executor.submit

        def submit_checked(step: Step) -> None:
            self.scheduler.check()
            submit_step(step)

        self.executor.submit = submit_checked

    def step(self, check: bool = True) -> None:
        self.now_s += self.step_s
        self.keep(*self.core.step())
        self.scheduler.check()
        self.keep(*self.core.pauses.finish_pause())

    def run(self, check: bool = True, limit: int = 10_000) -> None:
        while self.core.has_work():
            self.step()


def serve(core: EngineCore, *arrivals: list[ToCore]) -> list[FromCore]:
    """Run the loop of the core's process, which receives one of these lists whenever it has nothing to do, and at last its
    end. Return what it sends."""
    end: list[ToCore] = [Shutdown()]
    batches, sent, duty = iter([*arrivals, end]), list[FromCore](), process.Duty()

    def receive(timeout_s: float | None) -> list[ToCore]:
        assert duty.job is None, "a core that waits for messages has no job that could be overdue"
        return [] if timeout_s in (0.0, process.TRANSFER_POLL_S) else next(batches)

    process._serve(core, cast(Any, SimpleNamespace(receive=receive, send=sent.append)), duty)
    return sent


def alone(
    message: Submit,
    vocab_size: int = 50,
    max_model_len: int = 64,
    groups: Sequence[GroupInfo] = (GroupInfo(),),
    weights: str | None = None,
) -> tuple[list[int], bytes | None, list[TokenLogprobs] | None]:
    """Return tokens, embedding and the prompt's log-probabilities of a request that has an oracle for itself, with no
    scheduler at all."""
    config = ExecutorConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        block_size=max_model_len,
        kv_cache_bytes=(1 + sum(2 * group.pages or 1 for group in groups)) * max_model_len * 8,
        hf_overrides={"vocab_size": vocab_size, "groups": list(groups)},
    )
    executor = OracleExecutor(config)
    if weights is not None:
        executor.update_weights(weights)
    driver = Driver(executor)
    prompt = np.frombuffer(message.tokens, "<i4").tolist()
    sequence = driver.admit(prompt, message.sampling, message.pooling, message.adapter)
    result = driver.advance(sequence)
    prompt_logprobs = result.prompt_logprobs.get(0) or None
    if message.pooling is not None:
        return [], result.embeddings[0], prompt_logprobs
    if message.max_tokens == 0:
        return [], None, prompt_logprobs
    most = min(message.max_tokens, max_model_len - len(prompt))
    while len(sequence.output) < most and sequence.tokens[-1] not in message.sampling.stop_ids:
        driver.advance(sequence)
    return sequence.output, None, prompt_logprobs


def random_drafts(rng: random.Random, may_have_layer: bool = True) -> SpeculativeConfig:
    least, has_layer = rng.randint(1, 3), rng.random() < 0.5 and may_have_layer
    return SpeculativeConfig(
        method="mtp" if has_layer else "ngram",
        num_speculative_tokens=rng.randint(1, MAX_LAYER_DRAFTS if has_layer else 9),
        prompt_lookup_min=least,
        prompt_lookup_max=least + rng.randint(0, 3),
        max_draft_rows=rng.choice([1, 5, 64]),
    )


def random_request(
    rng: random.Random, number: int, vocab_size: int, max_model_len: int, repeats: bool = False
) -> Submit:
    """Prompts share prefixes often, so that hits, duplicates and full hits are common. With `repeats`, answers are
    written with one to three tokens, so that drafts are right often, but not always."""
    shared = random.Random(rng.randrange(4)).choices(range(vocab_size), k=40)
    length = rng.choice([rng.randint(1, 30), BLOCK_SIZE * rng.randint(1, 7)])
    keep = rng.randint(0, length)
    tokens = shared[:keep] + rng.choices(range(vocab_size), k=length - keep) if rng.random() < 0.7 else shared[:length]
    stop_ids = (3,) if rng.random() < 0.3 else ()
    allowed = rng.choice([(7,), (7,), (8, 9), (3, 8, 9)]) if repeats else ()
    max_tokens = rng.randint(1, max_model_len - length - 1)
    return submit(
        f"r{number}",
        tokens,
        max_tokens=0 if random.Random(-1 - number).random() < 0.05 else max_tokens,
        sampling=Sampling(
            temperature=0.0,
            stop_ids=stop_ids,
            allowed_ids=allowed,
            prompt_logprobs=1 if random.Random(number).random() < 0.05 else None,
        ),
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=rng.choice([None, None, "a", "b"]),
        adapter=rng.choice([None, None, None, "x"]),
        pooling=rng.choice([None] * 12 + ["last", "mean"]),
    )
