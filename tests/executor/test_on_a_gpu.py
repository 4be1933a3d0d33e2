"""Whole models on a GPU: their numbers beside a CPU's at the sizes of real models, and what thousands of steps leave."""

import json
import random
import resource
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.shapes import MODELS, config_of

from penstock.executor.protocol import ExecutorConfig, Sampling
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.driver import Driver, Sequence
from tests.executor.small_models import folder

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
NUM_SLOTS, LENGTH = 6, 80


def answers(path: Path, device: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [299] of a prompt's own tokens, which comes in chunks, and [5, vocabulary] of what may follow.

    Only one token may be sampled, so that the same text is continued everywhere."""
    config = ExecutorConfig(
        model=str(path), device=device, dtype=dtype, load_format="dummy", kv_cache_bytes=2**28, max_num_seqs=4
    )
    executor = UniprocExecutor(config)
    driver, rng = Driver(executor), random.Random(1)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=-1, allowed_ids=(100,))
    sequence = driver.admit([rng.randrange(5, 5000) for _ in range(300)], sampling)
    prompt: list[float] = []
    after: list[torch.Tensor] = []
    while len(after) < 5:
        result = driver.advance(sequence, chunk=130)
        prompt += [found.values[0] for found in result.prompt_logprobs.get(0, [])]
        if 0 in result.logprobs:
            found = result.logprobs[0]
            values = torch.full((executor.info.vocab_size,), torch.nan)
            after.append(values.index_copy(0, torch.tensor(found.ids[1:]), torch.tensor(found.values[1:])))
    executor.close()
    return torch.tensor(prompt), torch.stack(after)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_at_real_sizes_are_a_cpus(name: str, dtype: str, device: str, tmp_path: Path) -> None:
    """Two layers with made-up weights; float32 to its rounding, bfloat16 to that of two layers."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, is_tiny=False) | LAYERS))
    here, there = answers(tmp_path, "cpu", dtype), answers(tmp_path, device, dtype)
    for expected, got in zip(here, there, strict=True):
        error = (got - expected).norm() / (expected - expected.mean()).norm()
        assert error < (1e-4 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])
def test_ten_thousand_steps_leave_nothing_behind(device: str) -> None:
    """Requests of any length come and go, prompts in chunks beside answers, some with more than a draw."""
    config = ExecutorConfig(
        model=str(folder("qwen3")), device=device, dtype="float32", kv_cache_bytes=2**20, block_size=4, max_num_seqs=6
    )
    driver, rng = Driver(UniprocExecutor(config)), random.Random(0)
    running: dict[int, tuple[Sequence, int]] = {}

    def step() -> None:
        for slot in range(NUM_SLOTS):
            if slot not in running and rng.random() < 0.5:
                prompt = [rng.randrange(160) for _ in range(rng.randint(1, LENGTH // 2))]
                sampling = Sampling(
                    temperature=rng.choice([0.0, 0.8]),
                    top_k=rng.choice([0, 20]),
                    seed=rng.randrange(2**64),
                    presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                    logprobs=rng.choice([None, None, 3]),
                )
                sequence = Sequence(slot, prompt, len(prompt), sampling=sampling)
                driver._announce(sequence)
                running[slot] = sequence, rng.randint(1, LENGTH // 2)
        if running:
            driver.advance(*(sequence for sequence, _ in running.values()), chunk=rng.choice([1, 5, 100]))
        for slot, (sequence, count) in list(running.items()):
            if len(sequence.output) >= count:
                driver.free += sequence.blocks
                del running[slot]

    def held() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(2000):
        step()
    before = held()
    for _ in range(8000):
        step()
    assert held() - before < (4 << 20 if device == "cpu" else 64 << 10)
