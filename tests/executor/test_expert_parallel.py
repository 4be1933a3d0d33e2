"""Models with experts over several ranks, sharing out slices of every expert, or whole experts."""

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock import LLM, SamplingParams
from penstock.eplb import choose, plan
from penstock.executor.models.moe import ExpertCounter, SlotTable
from penstock.executor.protocol import DType, EplbConfig, ExpertUpdate, WeightsError
from tests.executor import test_eight_bits
from tests.support.checkpoints import config_of, executor_of, prompts, running
from tests.support.driver import Driver
from tests.support.packed_models import folders
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
