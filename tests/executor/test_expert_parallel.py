"""Models with experts over several ranks, sharing out slices of every expert, or whole experts. Experts that move between two ranks'
GPUs, beside steps that compute with the resident ones: one rank of two, on a made-up device; the other one, and the threads,
are made up as well."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock import LLM, SamplingParams
from penstock.eplb import Plan, choose, plan
from penstock.executor.models.moe import ExpertCounter, SlotTable
from penstock.executor.protocol import DType, EplbConfig, ExpertUpdate, WeightsError
from penstock.executor.step import rebalance
from penstock.executor.step.rebalance import Rebalancer
from tests.executor import test_eight_bits
from tests.support.checkpoints import config_of, executor_of, prompts, running
from tests.support.driver import Driver
from tests.support.packed_models import folders
from tests.support.pretended_gpu import PretendedGpu
from tests.support.pretended_memory import GPU
from tests.support.pretended_streams import Stream
from tests.support.small_models import folder, greedy


@pytest.mark.usefixtures("forked_ranks")
def test_moving_experts_at_every_step_changes_no_token_and_keeps_the_weights() -> None:
    """The load of a few tokens jumps about, and every plan that is a little better is carried out."""
    given = prompts(4, seed=3)
    restless = EplbConfig(window=2, interval=1, redundant_experts=2, target=1.0, min_gain_per_gib=0.0)
    config = config_of("deepseek-v3", 2, enable_expert_parallel=True, enable_eplb=True, eplb_config=restless)
    update = ExpertUpdate(balance=0.0)
    with running(config) as executor:
        driver = Driver(executor)
        sequences = [driver.admit(prompt) for prompt in given]
        while waiting := [s for s in sequences if len(s.output) < 40]:
            update = driver.advance(*waiting, chunk=9).experts or update
        refused = "weights cannot be replaced with enable_eplb, which moves experts between ranks"
        with pytest.raises(WeightsError, match=refused):
            executor.update_weights(str(folder("deepseek-v3")))
        with pytest.raises(WeightsError, match=refused):  # it could never wake up from this level
            executor.sleep(2)
        executor.sleep(1)
        executor.wake(["kv_cache"])
        assert Driver(executor).one_by_one(5, given[:1]) == [greedy("deepseek-v3", given[0], 5)[0]]
    assert [s.output[:40] for s in sequences] == [greedy("deepseek-v3", prompt, 40)[0] for prompt in given]
    assert update.num_rebalances >= 2 and update.num_moved > 0 and update.moved_bytes > 0 and update.num_aborted == 0
    for shares, count in ((update.rank_load, 2), (update.expert_load, 8)):
        assert len(array("f", shares)) == count and sum(array("f", shares)) == pytest.approx(1.0)


@pytest.mark.usefixtures("forked_ranks")
def test_the_offline_engine_says_how_evenly_experts_are_loaded() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    options["eplb_config"] = {"window": 4, "interval": 2, "target": 1.0, "redundant_experts": 2}
    options |= {"kv_cache_bytes": 2**22, "max_num_seqs": 4, "dtype": "float32"}
    greedy_20 = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = prompts(1, seed=4)[0]
    with LLM(str(folder("mixtral")), skip_tokenizer=True, **options) as llm:
        (answer,) = llm.generate([prompt], greedy_20, use_tqdm=False)
        metrics = llm.get_metrics()
    assert answer.outputs[0].token_ids == greedy("mixtral", prompt, 20)[0]
    assert sum(metrics[f"experts_num_{kind}"] for kind in ("rebalances", "reweights", "skipped")) > 0
    assert 0 < metrics["experts_balance"] <= 1


@pytest.mark.parametrize(
    ("case", "dtype"), [("mixtral", "float32"), ("qwen3-moe", "bfloat16"), ("in eight bits", "bfloat16")]
)
@torch.inference_mode()
def test_a_copy_of_an_expert_computes_the_same(case: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number outside of its tensors would stay behind when an expert moves to another rank."""
    if case == "in eight bits":
        test_eight_bits.in_eight_bits(monkeypatch)
    executor = executor_of(folders("deepseek-v3")[0] if case == "in eight bits" else case, dtype=dtype)
    layers = executor._rank.runner._model.experts
    assert layers
    x = torch.randn(5, executor.info.hidden_size).to(getattr(torch, dtype))
    for first, second, *_ in (experts.expert_slots for experts in layers):
        expected = second(x)
        assert not torch.equal(first(x), expected)
        for mine, other in zip(first.tensors(), second.tensors(), strict=True):
            mine.copy_(other)
        assert torch.equal(first(x), expected)


def test_the_table_of_slots_is_the_numpy_rule_for_each_plan_in_one_memory() -> None:
    """An expert has any number of copies in a plan."""
    ids = torch.randint(0, 12, (500, 3))
    rng = np.random.default_rng(6)
    placed = plan(rng.zipf(1.5, (2, 12)).astype(float), 20, 4)
    table = SlotTable(placed, 0, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in vars(table).values()]
    assert table.expert_slots(ids).tolist() == choose(placed, 0, np.arange(500)[:, None], ids.numpy()).tolist()
    for _ in range(5):
        placed = plan(rng.zipf(1.3, (2, 12)).astype(float), 20, 4)
        table.replace(placed, 1)
        expected = choose(placed, 1, np.arange(500)[:, None], ids.numpy())
        assert table.expert_slots(ids).tolist() == expected.tolist()
    assert [tensor.data_ptr() for tensor in vars(table).values()] == addresses


def test_tokens_of_padding_are_not_counted() -> None:
    counts = torch.zeros(5, dtype=torch.int64)
    num_tokens = torch.tensor([3])
    ids = torch.tensor([[0, 1], [1, 2], [4, 1], [3, 3], [3, 0]], dtype=torch.int32)
    ExpertCounter(counts, num_tokens).add(ids)
    assert counts.tolist() == [1, 3, 1, 0, 1]
    num_tokens.fill_(1 << 40)
    ExpertCounter(counts, num_tokens).add(ids)
    assert counts.tolist() == [3, 6, 2, 3, 2]


def test_counting_does_not_wait_for_the_device() -> None:
    """Where a size depends on numbers, tensors without numbers have none, and torch refuses."""
    with FakeTensorMode():
        ids = torch.zeros(4, 2, dtype=torch.int32)
        counter = ExpertCounter(*(torch.zeros(n, dtype=torch.int64) for n in (5, 1)))
        counter.add(ids)
        with pytest.raises(RuntimeError, match="bincount"):
            torch.bincount(ids.flatten(), minlength=5)


LAYERS, EXPERTS, SLOTS = 4, 4, 4  # of both ranks


class Other:
    """The group, and the links to the other rank, which agrees with us and has every expert."""

    rank, world, is_first, device = 0, 2, True, GPU

    def __init__(self) -> None:
        self.streams: list[Stream] = []  # on which something went over the links

    def minimum(self, value: int) -> int:
        return value

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        tensor.sum()
        self._end()

    def receive(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        tensor.fill_(7)
        self._end()

    def _end(self) -> None:
        """Let the host wait, as with NCCL."""
        self.streams.append(torch.cuda.current_stream(GPU))  # type: ignore[arg-type]
        self.streams[-1].synchronize()


class Expert:
    def __init__(self) -> None:
        self._weight = torch.zeros(300, device=GPU)

    def tensors(self) -> list[torch.Tensor]:
        return [self._weight]


@pytest.fixture
def open_rebalancer(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Rebalancer, list[SimpleNamespace]]]:
    """Open the first of two ranks whose threads run at once, with its layers."""

    class Thread:
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self._run: Callable[[], object] = lambda: target(*args)

        def start(self) -> None:
            with gpu.thread("beside the steps"):
                self._run()

        def is_alive(self) -> bool:
            return False

    def opened(experts_of_slots: list[int], other: Other, **options: Any) -> tuple[Rebalancer, list[SimpleNamespace]]:
        placed = Plan.of(np.tile(experts_of_slots, (LAYERS, 1)), EXPERTS, 2)
        slots = [[Expert() for _ in range(placed.slots_per_rank)] for _ in range(LAYERS)]
        layers = [
            SimpleNamespace(num_experts=EXPERTS, expert_slots=each, counter=None, replace=Mock()) for each in slots
        ]
        config = EplbConfig(window=1, interval=1, target=1.0, min_gain_per_gib=0.0, **options)
        return Rebalancer(config, placed, layers, other, other), layers  # type: ignore[arg-type]

    monkeypatch.setattr(rebalance, "threading", SimpleNamespace(Thread=Thread))
    return opened


def test_experts_arrive_beside_and_move_between_steps(gpu: PretendedGpu, open_rebalancer: Callable[..., Any]) -> None:
    other = Other()
    rebalancer, layers = open_rebalancer(list(range(SLOTS)), other)
    loads = [torch.tensor(load).to(GPU) for load in ([9, 9, 1, 1], [1, 9, 1, 9])]
    moved = 0
    for step in range(80):
        rebalancer.boundary(20)
        for experts in layers:
            experts.counter.counts.add_(loads[step // 10 % 2])
            for expert in experts.expert_slots:
                expert.tensors()[0] * 2
        update = rebalancer.take_update()
        moved = moved if update is None else update.num_moved
    assert moved >= 2 * LAYERS and gpu.stream not in other.streams


def test_a_plan_that_changes_only_shares_of_copies_counts_apart(open_rebalancer: Callable[..., Any]) -> None:
    rebalancer, layers = open_rebalancer([0, 1, 2, 3, 1, 0], Other(), max_moves=0)
    for load in ([9, 1, 1, 5], [1, 1, 9, 1]):
        for _ in range(20):
            rebalancer.boundary(20)
            for experts in layers:
                experts.counter.counts.add_(torch.tensor(load).to(GPU))
    update = rebalancer.take_update()
    assert update.num_reweights >= 2 and update.num_skipped > 0, "the shares change with the load alone"
    assert update.num_rebalances == update.num_moved == update.num_aborted == 0
    assert all(experts.replace.call_count >= 2 for experts in layers)


def test_a_move_has_failed_after_any_error_in_its_thread() -> None:
    """Otherwise every later step would ask all ranks whether the expert has arrived."""
    fail = Mock(side_effect=MemoryError("no memory for what arrives"))
    here = cast(rebalance.Rebalancer, SimpleNamespace(_stream=None, _run=fail))
    move = rebalance.Move(layer=0, copies=[(0, [1])])
    with pytest.raises(MemoryError):
        rebalance.Rebalancer._bring(here, move)
    assert move.state == rebalance.FAILED
