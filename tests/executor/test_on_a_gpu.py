"""Whole models on a GPU: their logits beside a CPU's at the sizes of real models, and the memory after thousands of steps."""

import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.shapes import MODELS, config_of

from penstock.executor.loading import dummy
from penstock.executor.protocol import Device, DType, ExecutorConfig, KvDType, Sampling
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver, Sequence, Trace
from tests.support.refusals import cases, hardest, hardest_rows
from tests.support.twins import changed, eight_bits, torch_ops

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LAYERS = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
SMALL = {"vocab_size": 5000}  # as many tokens as prompts are made of
NUM_SLOTS, LENGTH = 6, 80
Answers = tuple[torch.Tensor, ...]


# A GPU's bfloat16 may be this much farther from float32 than a CPU's. Where experts are chosen, the same rounding in
# another order is up to a third farther; attention that is a tenth too sharp is three times as far. Pages of eight bits
# round more than all else, and on both alike: numbers that are cut off instead of rounded are 1.75 times as far.
NEARNESS: dict[KvDType, float] = {"auto": 2.0, "fp8": 1.5}
PAGES_OF_EIGHT_BITS: list[tuple[str, KvDType]] = [("qwen3-0.6b", "fp8"), ("deepseek-v2-lite", "fp8")]
TWINS = changed(torch_ops, blocks=eight_bits)


def write(folder: Path, config: dict[str, Any], **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config | LAYERS | changes))


def distance(monkeypatch: pytest.MonkeyPatch, path: Path, device: Device, pages: KvDType) -> float:
    """Return how many times as far from float32 the device is as the kernels' twins, which round after every operation.
    The weights are numbers that bfloat16 can hold, so that only the arithmetic differs."""
    with monkeypatch.context() as patch:
        repeat = dummy._repeat_noise
        patch.setattr(dummy, "_repeat_noise", lambda period, shape: repeat(period.bfloat16().to(period.dtype), shape))
        compute_with(patch, TWINS)
        exact, near = answers(path, "cpu", "float32"), answers(path, "cpu", "bfloat16", pages)
    return error(answers(path, device, "bfloat16", pages), exact) / error(near, exact)


def error(got: Answers, exact: Answers) -> float:
    """Return the norm of the difference over that of the deviations; the larger one of prompt and vocabulary."""
    pairs = zip(got, exact, strict=True)
    return max(float((ours - theirs).norm() / (theirs - theirs.mean()).norm()) for ours, theirs in pairs)


def answers(path: Path, device: Device, dtype: DType, pages: KvDType = "auto") -> Answers:
    """Return log-probabilities [299] of the tokens of a prompt, which comes in chunks, and [5, vocabulary] after it.

    Only one token may be sampled, so that the same text is continued everywhere."""
    config = ExecutorConfig(
        model=str(path), device=device, dtype=dtype, load_format="dummy", kv_cache_bytes=2**28, max_num_seqs=4,
        kv_cache_dtype=pages,
    )  # fmt: skip
    executor = UniprocExecutor(config)
    driver, rng = Driver(executor), random.Random(1)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0, logprobs=-1, allowed_ids=(100,))
    sequence = driver.admit([rng.randrange(5, 5000) for _ in range(300)], sampling)
    prompt: list[float] = []
    after: Trace = []
    while len(after) < 5:
        result = driver.advance(sequence, chunk=130)
        prompt += [each.values[0] for each in result.prompt_logprobs.get(0, [])]
        after += [(each.ids, each.values) for each in result.logprobs.values()]
    executor.close()
    return torch.tensor(prompt), by_token(after)


def by_token(trace: Trace) -> torch.Tensor:
    """Return the log-probabilities of all tokens [steps, vocabulary], whose first one is the sampled token's again."""
    ids, values = torch.tensor([ids[1:] for ids, _ in trace]), torch.tensor([values[1:] for _, values in trace])
    return torch.full_like(values, torch.nan).scatter(1, ids, values)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float32_at_real_sizes_are_a_cpus(name: str, device: Device, tmp_path: Path) -> None:
    """Two layers with made-up weights, to the rounding of their sums."""
    write(tmp_path, config_of(name, is_tiny=False))
    exact = answers(tmp_path, "cpu", "float32")
    assert error(answers(tmp_path, device, "float32"), exact) < 1e-4


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize(("name", "pages"), [*((name, "auto") for name in MODELS), *PAGES_OF_EIGHT_BITS])
def test_logits_in_bfloat16_at_real_sizes_are_as_near_as_a_cpus(
    monkeypatch: pytest.MonkeyPatch, name: str, pages: KvDType, device: Device, tmp_path: Path
) -> None:
    """How far rounding leads away depends on the model, up to a sixth where experts are chosen, so that no figure does for
    all. A CPU's bfloat16 says how far it may be."""
    write(tmp_path, config_of(name, is_tiny=False))
    assert distance(monkeypatch, tmp_path, device, pages) < NEARNESS[pages]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), GPU])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_a_request_has_the_same_bits_alone_and_among_others(name: str, device: Device, tmp_path: Path) -> None:
    """With `batch_invariant`: a prompt of several splits, in other chunks, decoded beside others from graphs of other sizes."""
    shape = config_of(name, is_tiny=device == "cpu") | SMALL
    # Sixteen experts: making up all 128 takes a minute.
    write(tmp_path, shape | ({"num_experts": min(16, shape["num_experts"])} if "num_experts" in shape else {}))
    length = 40 if device == "cpu" else 700
    prompts = [random.Random(seed).choices(range(5, 5000), k=length) for seed in range(40)]
    config = ExecutorConfig(
        model=str(tmp_path), device=device, dtype="bfloat16", load_format="dummy", kv_cache_bytes=2**28,
        max_num_seqs=64, batch_invariant=True,
    )  # fmt: skip
    executor = UniprocExecutor(config)
    seen = []
    for count, chunk in ((0, None), (2, length // 3), (39, 150)):
        driver = Driver(executor)
        others = [driver.admit(prompt) for prompt in prompts[1 : 1 + count]]
        watched = driver.admit(prompts[0], Sampling(temperature=0.0, logprobs=-1))
        seen.append(driver.trace(watched, *others, count=5, chunk=chunk))
    executor.close()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("name", hardest(["qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v2-lite"], "qwen3-30b-a3b"))
def test_a_cpu_in_the_gpus_place_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    write(tmp_path, config_of(name, is_tiny=True) | SMALL)
    assert distance(monkeypatch, tmp_path, "cpu", "auto") < NEARNESS["auto"]


@pytest.mark.parametrize(("name", "pages"), hardest_rows(PAGES_OF_EIGHT_BITS, ()))
def test_pages_of_eight_bits_with_a_wrong_scale_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, pages: KvDType
) -> None:
    """A CPU is in the GPU's place; the second time it reads values as a tenth too large."""
    write(tmp_path, config_of(name, is_tiny=True) | SMALL)
    compute_with(monkeypatch, TWINS)
    assert distance(monkeypatch, tmp_path, "cpu", pages) < NEARNESS[pages]
    reads = {read.__name__: read for read in (torch_ops.paged_attention, torch_ops.latent_attention)}
    wrong = {name: lambda *inputs, read=read: 1.1 * read(*inputs) for name, read in reads.items()}
    compute_with(monkeypatch, changed(TWINS, **wrong))
    assert distance(monkeypatch, tmp_path, "cpu", pages) > NEARNESS[pages]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), GPU])
def test_ten_thousand_steps_leave_nothing_behind(device: Device) -> None:
    """Requests of any length come and go, prompts in chunks beside answers, some with more than a draw."""
    driver, rng = Driver(executor_of("qwen3", device=device, block_size=4, max_num_seqs=NUM_SLOTS)), random.Random(0)
    samplings = cases(__file__, "samplings of a watched world", Sampling=Sampling)
    running: dict[int, tuple[Sequence, int]] = {}

    def step() -> None:
        for slot in range(NUM_SLOTS):
            if slot not in running and rng.random() < 0.5:
                prompt = [rng.randrange(160) for _ in range(rng.randint(1, LENGTH // 2))]
                sequence = Sequence(slot, prompt, len(prompt), sampling=rng.choice(samplings))
                driver.readmit(sequence)
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
