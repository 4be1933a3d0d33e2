"""A request of a long context among short ones, on a GPU or, at a shorter length, on a CPU."""

import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.shapes import config_of

from penstock.executor.protocol import Device, DType, Sampling
from tests.executor.test_on_a_gpu import NEARNESS, SMALL, TWINS, Answers, by_token, error, write
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.refusals import hardest

LONG = [pytest.param("cuda", length, marks=pytest.mark.gpu) for length in (32_000, 128_000)]


@pytest.mark.parametrize(("device", "long"), [("cpu", 2500), *LONG])
@pytest.mark.parametrize("is_invariant", hardest([False, True], False))
def test_a_long_request_and_short_ones_answer_as_alone(
    monkeypatch: pytest.MonkeyPatch, device: Device, long: int, is_invariant: bool, tmp_path: Path
) -> None:
    """Short ones decode beside a long prompt, and another one comes while the long one decodes. Scores are three times as
    wide as usual: otherwise attention would be a mean of all positions, in which none counts."""
    shape = config_of("qwen3-0.6b", is_tiny=device == "cpu") | SMALL
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "max_position_embeddings": long + 1000}
    write(tmp_path, shape, **granite, attention_multiplier=3 * shape["head_dim"] ** -0.5)

    def ask(dtype: DType, *requests: tuple[int, ...], **options: Any) -> list[Answers]:
        """Return the answers to the first of each tuple of lengths; the others were there before."""
        options |= {"kv_cache_bytes": 2**28 + long * 2**15, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
        options |= {"device": device, "block_size": 16, "load_format": "dummy"}
        executor, found = executor_of(tmp_path, dtype=dtype, **options), list[Answers]()
        for lengths in requests:
            watched, *others = (random.Random(length).choices(range(5, 5000), k=length) for length in lengths)
            driver = Driver(executor)
            beside = [driver.admit(prompt) for prompt in others]
            driver.generate(*beside, count=1, chunk=500)
            sequence = driver.admit(watched, Sampling(temperature=0.0, logprobs=-1, allowed_ids=(100,)))
            found.append((by_token(driver.trace(sequence, *beside, count=5, chunk=500)),))
        executor.close()
        return found

    among, alone = [(long, 5, 300, 700), (30, long, 700)], [(long,), (30,)]
    got = ask("bfloat16", *among, *alone, batch_invariant=is_invariant)
    compute_with(monkeypatch, TWINS)
    near, exact = ask("bfloat16", *alone, enforce_eager=True), ask("float32", *alone, enforce_eager=True)
    for ours, twin, best in zip(got, near * 2, exact * 2, strict=True):
        assert error(ours, best) < NEARNESS["auto"] * error(twin, best)
    assert not is_invariant or [error(*each) for each in zip(got[:2], got[2:], strict=True)] == [0, 0]
