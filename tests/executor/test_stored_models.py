"""Models as checkpoints store them, against transformers on the same numbers: one table of storage and ways to compute.

Weights that a CPU or a GPU computes with stay codes; others are dequantized when they are loaded. The memory table of a
model says which.
"""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock.executor.code_types import is_computed
from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.support import gguf_files, packed_models
from tests.support.checkpoints import (
    compute_codes_as_a_gpu,
    compute_with,
    config_of,
    executor_of,
    prompts,
    running,
)
from tests.support.coded import FILE_TYPES
from tests.support.driver import Driver
from tests.support.stored_models import OUTER, greedy, stored, text_of_images
from tests.support.twins import changed, experts, torch_ops

needs_codes = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")
CPU = torch.device("cpu")
CODES, NUMBERS, BYTES = "weights as codes", "coded weights as float32", "FP8 weights as float32"
MIXED = [name for name, case in gguf_files.CASES.items() if case.kinds is FILE_TYPES]
GROUPED = [name for name, case in gguf_files.CASES.items() if case.kinds and name not in MIXED]
PLAIN = [name for name, case in gguf_files.CASES.items() if not case.kinds]


class Row(NamedTuple):
    name: str  # of a stored model
    kept: str | None  # the entry of its memory table that its coded weights are in
    options: dict[str, Any]
    way: str = "cpu"
    num_tokens: int = 12


def rows() -> list[Row]:
    auto, wide = {"dtype": "auto"}, {"dtype": "float32"}
    found = [Row(f"gguf/{name}", CODES, auto, num_tokens=16) for name in MIXED]
    found += [Row(f"gguf/{name}", NUMBERS, wide, num_tokens=16) for name in MIXED]
    found += [Row(f"gguf/{name}", None, wide, num_tokens=20) for name in PLAIN]
    # Scales of the K types are rounded to 16 bits there, which after more tokens tips a near tie.
    found += [Row(f"gguf/{name}", CODES, wide, "gpu", num_tokens=8) for name in GROUPED]
    for name in packed_models.CASES:
        if "floats" in name:
            found.append(Row(name, BYTES, wide))
        else:  # the scales of one are of 32 bits that no 16 are
            found.append(Row(name, NUMBERS if name == "gptq-v2" else CODES, auto))
        found.append(Row(name, CODES, wide, "gpu"))
    found += [Row(f"blocks/{name}", BYTES, wide) for name in packed_models.BLOCKS]
    found += [Row("mxfp4/gpt-oss", CODES, auto, num_tokens=16), Row("mxfp4/gpt-oss", NUMBERS, wide, num_tokens=16)]
    found.append(Row("mxfp4/gpt-oss", CODES, auto, "gpu of experts", num_tokens=16))
    by_experts = {"enable_expert_parallel": True}
    found += [Row(name, CODES, auto, "ranks") for name in ("awq-32", "packed-8")]
    found += [
        Row("gptq-ordered", NUMBERS, auto, "ranks"),  # inputs that are out of order are cut as numbers
        Row("packed-experts", CODES, auto | by_experts, "ranks"),
        Row("blocks/qwen3", BYTES, wide, "ranks"),
        Row("blocks/deepseek-v3", BYTES, wide | by_experts, "ranks"),
        Row("gguf/mixed", NUMBERS, auto, "ranks", num_tokens=24),  # half of 256 columns is no whole block of 256 values
        Row("gguf/qwen3-moe", CODES, auto | by_experts, "ranks", num_tokens=16),
    ]
    return found


# By name, way and dtype: every storage once on each way to compute it, with experts or an order where it has them.
HARDEST = frozenset(Path(__file__).with_name("stored_models_fast.txt").read_text().split())


def id_of(row: Row) -> str:
    return f"{row.name}-{row.way}-{row.options['dtype']}".replace(" ", "-")


def marked() -> list[Any]:
    """The rows of the table; those that are not the hardest are slow."""
    found = {id_of(row): row for row in rows()}
    assert found.keys() >= HARDEST
    return [
        pytest.param(row, id=name, marks=() if name in HARDEST else pytest.mark.slow) for name, row in found.items()
    ]


def check_tokens(driver: Driver, row: Row) -> None:
    """A prompt by itself, and several that start one after the other and come in chunks."""
    memory = driver.executor.info.memory
    assert {CODES, NUMBERS, BYTES} & memory.keys() >= ({row.kept} if row.kept else set())
    given = [[token % driver.executor.info.vocab_size for token in prompt] for prompt in prompts(3, seed=3)]
    expected = [greedy(row.name, prompt, row.num_tokens) for prompt in given]
    assert row.kept is None or max(len(set(tokens)) for tokens in expected) > 3
    assert driver.generate(driver.admit(given[0]), count=row.num_tokens) == expected[:1]
    assert driver.one_by_one(row.num_tokens, given) == expected


@needs_codes
@pytest.mark.parametrize("row", marked())
def test_tokens_are_those_of_transformers_on_the_same_numbers(row: Row, request: pytest.FixtureRequest) -> None:
    patch = request.getfixturevalue("monkeypatch")
    config = config_of(stored(row.name)[0], **row.options)
    if row.way == "ranks":
        request.getfixturevalue("forked_ranks")
        with running(config_of(stored(row.name)[0], 2, **row.options)) as ranks:
            check_tokens(Driver(ranks), row)
        return
    if row.way == "gpu":
        compute_codes_as_a_gpu(patch)
    elif row.way == "gpu of experts":  # whose grouped products take every expert's codes in one tensor
        compute_with(patch, changed(torch_ops, fused_experts=experts.fused_experts))
        patch.setattr("penstock.executor.models.load._kept_codes", lambda *_: "MXFP4")
    executor = UniprocExecutor(config)
    if row.way != "cpu":
        assert not {NUMBERS, BYTES} & executor.info.memory.keys()
        assert all(layer.is_fused for layer in executor._rank._loaded.model.experts)
    elif row.kept is not None:
        assert executor.info.dtype == "float32"
        assert (CODES in executor.info.memory) == (row.kept == CODES)
    check_tokens(Driver(executor), row)


IMAGES = [(case, ("model.language_model.", "")) for case in OUTER]
IMAGES += [(case, ("language_model.model.", "language_model.")) for case in OUTER if case != "gemma4"]


@pytest.mark.parametrize(("case", "prefixes"), IMAGES)
def test_the_text_of_a_model_that_sees_is_the_model(case: str, prefixes: tuple[str, str], tmp_path: Path) -> None:
    executor = executor_of(text_of_images(case, tmp_path / "model", *prefixes))
    assert executor.info.fingerprint == executor_of(case).info.fingerprint
    given = prompts(2, seed=3)
    assert Driver(executor).one_by_one(16, given) == [greedy(case, prompt, 16) for prompt in given]


@needs_codes
def test_a_dtype_that_is_asked_for_widens_the_codes_and_is_another_model() -> None:
    path, _ = stored("gguf/mixed")
    kept, widened = (executor_of(path, dtype=dtype).info for dtype in ("auto", "float32"))
    sizes = [sum(each.memory.values()) - each.memory["KV cache"] for each in (kept, widened)]
    assert sizes[0] < sizes[1] / 4
    assert kept.fingerprint != widened.fingerprint


@needs_codes
def test_the_file_is_let_go_as_soon_as_it_is_loaded() -> None:
    """Held by a cycle until the collector came by, it took its size in memory once more."""
    path, _ = stored("gguf/mixed")
    gc.collect()
    gc.disable()
    try:
        executor = executor_of(path, dtype="auto")
        assert str(path) not in Path("/proc/self/maps").read_text()
        del executor
    finally:
        gc.enable()


@needs_codes
def test_the_embedding_is_read_from_the_codes() -> None:
    path, _ = stored("gguf/mixed")
    values = GgufCheckpoint(path).read("model.embed_tokens.weight")
    assert isinstance(values, Weight)
    executor = executor_of(path, dtype="auto")
    assert executor.info.vocab_size == gguf_files.VOCAB
    embedded = executor._rank._loaded.model._vocabulary._rows(torch.tensor([3, 90, 3]))
    assert torch.equal(embedded, values.dequantize(CPU, torch.float32)[[3, 90, 3]])


def test_random_weights_need_no_codes_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((stored("mxfp4/gpt-oss")[0] / "config.json").read_text())
    config = ExecutorConfig(model=str(tmp_path), load_format="dummy", kv_cache_bytes=2**22)
    assert CODES not in UniprocExecutor(config).info.memory
