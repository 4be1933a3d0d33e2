"""Adapters beside each other and beside the base, token for token against transformers with the adapter merged by hand."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.executor.protocol import AdapterError, DType, Sampling
from penstock.executor.uniproc import UniprocExecutor
from tests.support.adapters import EVERYWHERE, Adapter, check_shared_steps, write
from tests.support.checkpoints import (
    REFUSED,
    config_of,
    edit_weights,
    executor_of,
    has_words,
    prompts,
    running,
    tensor_of,
)
from tests.support.driver import Driver
from tests.support.refusals import hardest_rows, table

COUNT, TENSORS = 12, "adapter_model.safetensors"
LLAMA = "llama-wide"
FULL = Sampling(temperature=0.0, logprobs=-1)
# Families by the special features of their projections: joined ones, rotated neighbours, a gate among the queries, latents …
CASES = ["gemma3", "qwen3.5", "llama", "qwen2-moe", "qwen2", "qwen3", "phi3", "glm4", "qwen3-moe", "granite"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")


def with_adapters(case: str, **options: Any) -> UniprocExecutor:
    return executor_of(case, enable_lora=True, **options)


SHARED = [(case, 1) for case in CASES] + [(case, 2) for case in ("llama", "glm4", "phi3", "qwen3-moe")]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("case", "ranks"), hardest_rows(SHARED, [("qwen3.5", 1), SHARED[-1]]))
def test_requests_with_several_adapters_and_with_none_share_steps(case: str, ranks: int, tmp_path: Path) -> None:
    """In models with experts, adapters change attention and, where there are any, shared experts."""
    targets = (*EVERYWHERE, *ATTENTION, "gate_up_proj")
    adapters = [Adapter(case, tmp_path / str(seed), seed, targets, rank=3 + seed) for seed in range(3)]
    if ranks == 1:
        check_shared_steps(with_adapters(case), case, adapters, prompts(6, seed=5), COUNT)
        return
    with running(config_of(case, ranks, enable_lora=True)) as executor:
        check_shared_steps(executor, case, adapters, prompts(6, seed=5), COUNT)


# The patterns hold for all modules and contradict the fields, as the merged model has one scale.
PATTERNS: dict[str, Any] = {"r": 9, "rank_pattern": dict.fromkeys(EVERYWHERE, 4)}
PATTERNS |= {"lora_alpha": 1.0, "alpha_pattern": dict.fromkeys(EVERYWHERE, 6.0)}
SCALES: list[dict[str, Any]] = [{"rank": 1, "alpha": 2}, {"rank": 256, "alpha": 512}, {"use_rslora": True}, PATTERNS]


@pytest.mark.parametrize("fields", SCALES, ids=["rank 1", "rank 256", "rslora", "patterns"])
def test_an_adapter_of_any_rank_and_scale_acts_as_the_merged_model(fields: dict[str, Any], tmp_path: Path) -> None:
    adapter = Adapter("llama", tmp_path, 3, **fields)
    executor = with_adapters("llama", max_lora_rank=256)
    driver, prompt = Driver(executor), prompts(1)[0]
    key = executor.load_adapter(str(adapter.path)).key
    assert driver.generate(driver.admit(prompt, adapter=key), count=COUNT) == [adapter.tokens(prompt, COUNT)]


STORED = list(itertools.product((LLAMA, "gemma3"), (torch.float32, torch.bfloat16), ("float32", "bfloat16")))
HARDEST = [(LLAMA, torch.bfloat16, "float32"), ("gemma3", torch.float32, "bfloat16")]


@pytest.mark.parametrize(("case", "stored", "dtype"), hardest_rows(STORED, HARDEST))
def test_bits_are_the_same_alone_and_in_a_batch(case: str, stored: torch.dtype, dtype: DType, tmp_path: Path) -> None:
    """With an adapter, and without one beside those that have one: as without adapters at all."""
    adapters = [Adapter(case, tmp_path / str(seed), seed, rank=5, alpha=5.0, dtype=stored) for seed in range(2)]
    prompt, others = prompts(1, seed=9, low=30, high=30)[0], prompts(9, seed=10)
    plain = Driver(executor_of(case, dtype=dtype))
    base = plain.trace(plain.admit(prompt, FULL), count=20)
    for chosen in (None, 0):
        alone, batched = with_adapters(case, dtype=dtype), with_adapters(case, dtype=dtype)
        first = [alone.load_adapter(str(adapter.path)).key for adapter in adapters]
        assert first == [batched.load_adapter(str(adapter.path)).key for adapter in adapters]
        keys, adapter = [*first, None], None if chosen is None else first[chosen]
        single, driver = Driver(alone), Driver(batched)
        seen = single.trace(single.admit(prompt, FULL, adapter=adapter), count=20, chunk=7)
        beside = [driver.admit(each, adapter=keys[index % 3]) for index, each in enumerate(others)]
        watched = driver.admit(prompt, FULL, adapter=adapter)
        assert driver.trace(watched, *beside, count=20, chunk=4) == seen
        assert (seen == base) == (chosen is None)


def test_an_adapter_is_known_by_its_content(tmp_path: Path) -> None:
    executor = with_adapters("llama")
    first = executor.load_adapter(str(Adapter("llama", tmp_path / "a", 1).path))
    assert executor.load_adapter(str(Adapter("llama", tmp_path / "b", 1).path)) == first
    others = [Adapter("llama", tmp_path / "c", 2), Adapter("llama", tmp_path / "d", 1, alpha=7.0)]
    others.append(Adapter("llama", tmp_path / "e", 1, ("q_proj",)))
    older = {f"language_model.{name}": pair for name, pair in others[0].factors.items()}  # of a class for images too
    paths = [*(other.path for other in others), write(tmp_path / "f", older, 4, 6.0)]
    keys = {first.key, *(executor.load_adapter(str(path)).key for path in paths)}
    assert len(keys) == 5 and first.rank == 4 and first.num_bytes > 0


@pytest.fixture(scope="module")
def loaded() -> UniprocExecutor:
    return with_adapters("llama")


def check_refused(loaded: UniprocExecutor, path: Path, words: str) -> None:
    store = loaded._rank.adapters
    before = dict(store._held)
    with pytest.raises(AdapterError) as caught:
        loaded.load_adapter(str(path))
    assert has_words(str(caught.value), words), caught.value
    assert store._held == before


@pytest.mark.parametrize(("fields", "tensors", "words"), REFUSED["adapters"])
def test_a_folder_that_lies_is_refused_by_name_and_nothing_changes(
    fields: dict[str, Any], tensors: dict[str, Any], words: str, loaded: UniprocExecutor, tmp_path: Path
) -> None:
    path = Adapter("llama", tmp_path, random.Random(words).randrange(100)).path
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | fields))
    held = load_file(path / TENSORS)
    changes = {name: held[row] if isinstance(row, str) else tensor_of(row) for name, row in tensors.items()}
    edit_weights(path, dict.fromkeys(held) if "*" in tensors else changes, TENSORS)
    check_refused(loaded, path, words)


@pytest.mark.parametrize(("spoil", "words"), table(__file__, "adapter files", **globals()))
def test_files_that_are_no_adapter_are_refused(
    spoil: Callable[[Path], object], words: str, loaded: UniprocExecutor, tmp_path: Path
) -> None:
    path = Adapter("llama", tmp_path, 7).path
    spoil(path)
    check_refused(loaded, path, words)


def test_a_refused_path_is_named(loaded: UniprocExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="/xxx.*: File name too long"):
        loaded.load_adapter("/tmp/" + "x" * 300)
    with pytest.raises(AdapterError, match="null byte"):
        loaded.load_adapter("/tmp/\0")
    path = Adapter("llama", tmp_path, 3).path

    def is_file(_path: Path) -> bool:  # root may enter any folder
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(AdapterError, match=f"{path}: Permission denied"):
        loaded.load_adapter(str(path))


@pytest.mark.usefixtures("forked_ranks")
def test_processes_load_and_unload_together_or_not_at_all(tmp_path: Path) -> None:
    adapters = [Adapter("llama", tmp_path / str(seed), seed) for seed in range(4)]
    with running(config_of("llama", 2, enable_lora=True, max_cpu_loras=2, max_loras=2)) as executor:
        keys = [executor.load_adapter(str(adapter.path)).key for adapter in adapters[:2]]
        with pytest.raises(AdapterError, match="max_cpu_loras: 2 .* held already; unload one, also before a repl"):
            executor.load_adapter(str(adapters[2].path))
        driver, prompt = Driver(executor), prompts(1, seed=5)[0]
        one = driver.admit(prompt, adapter=keys[1])
        assert driver.generate(one, count=COUNT, chunk=7) == [adapters[1].tokens(prompt, COUNT)]
        executor.unload_adapter(keys[0])
        again = driver.admit(prompt, adapter=executor.load_adapter(str(adapters[3].path)).key)
        assert driver.generate(again, count=COUNT) == [adapters[3].tokens(prompt, COUNT)]
