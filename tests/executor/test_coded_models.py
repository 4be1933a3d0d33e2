"""Models whose weights are codes of every type, mixed in one file, against transformers over the values that the gguf
package reads."""

import gc
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.executor.code_types import is_computed
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_gguf import HIDDEN, INNER, VOCAB, loaded, metadata, random_model, shapes, write
from tests.support.coded import FILE_TYPES, packed
from tests.support.driver import Driver

pytestmark = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")
PROMPT = [5, 17, 80, 3, 44, 9, 71, 30, 12, 66, 2, 51]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each weight of another type."""
    rng, kinds = np.random.default_rng(0), cycle(FILE_TYPES)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, shape in shapes().items():
        kind = next(kinds) if len(shape) == 2 else "F32"
        tensors[name] = packed(rng, shape, kind, 0.06), kind
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32), kind
    return write(tmp_path_factory.mktemp("coded") / "mixed.gguf", "llama", metadata(), tensors)


def config(file: Path, **options: Any) -> ExecutorConfig:
    return ExecutorConfig(model=str(file), kv_cache_bytes=2**23, block_size=8, **options)


@pytest.fixture(scope="module")
def expected(file: Path) -> list[int]:
    like = random_model("llama", {"tie_word_embeddings": False, "hidden_size": HIDDEN, "intermediate_size": INNER})
    oracle = loaded(GgufCheckpoint(file), like)
    tokens = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    ids: list[int] = tokens[0, len(PROMPT) :].tolist()
    return ids


def test_tokens_are_those_of_transformers_however_the_prompt_is_cut(file: Path, expected: list[int]) -> None:
    driver = Driver(UniprocExecutor(config(file)))
    assert set(driver.executor.info.memory) >= {"weights", "weights as codes"}
    assert driver.executor.info.dtype == "float32"
    assert len(set(expected)) > 3
    assert driver.generate(driver.admit(PROMPT), count=24) == [expected]
    crowd = [driver.admit(PROMPT), *(driver.admit([7 + i, *PROMPT[i:]]) for i in range(6))]
    assert driver.generate(*crowd, count=24, chunk=5)[0] == expected


def test_the_file_is_let_go_as_soon_as_it_is_loaded(file: Path) -> None:
    """Held by a cycle until the collector came by, it took its size in memory once more."""
    gc.collect()
    gc.disable()
    try:
        executor = UniprocExecutor(config(file))
        assert str(file) not in Path("/proc/self/maps").read_text()
        del executor
    finally:
        gc.enable()


def test_ranks_whose_parts_cut_through_blocks_compute_with_numbers(file: Path, expected: list[int]) -> None:
    """Half of 256 columns is no whole block of 256 values."""
    together = open_multiproc(config(file, tensor_parallel_size=2))
    try:
        driver = Driver(together)
        assert driver.generate(driver.admit(PROMPT), count=24) == [expected]
    finally:
        together.close()


def test_a_dtype_that_is_asked_for_widens_the_codes_and_is_another_model(file: Path, expected: list[int]) -> None:
    kept, widened = (UniprocExecutor(config(file, dtype=dtype)) for dtype in ("auto", "float32"))
    assert "weights as codes" not in widened.info.memory
    sizes = [sum(each.info.memory.values()) - each.info.memory["KV cache"] for each in (kept, widened)]
    assert sizes[0] < sizes[1] / 4
    assert kept.info.fingerprint != widened.info.fingerprint
    driver = Driver(widened)
    assert driver.generate(driver.admit(PROMPT), count=24) == [expected]


def test_the_embedding_is_read_from_the_codes(file: Path) -> None:
    driver = Driver(UniprocExecutor(config(file)))
    assert driver.executor.info.vocab_size == VOCAB
    values = GgufCheckpoint(file).read("model.embed_tokens.weight")
    assert not isinstance(values, torch.Tensor)
    executor = driver.executor
    assert isinstance(executor, UniprocExecutor)
    embedded = executor._rank._loaded.model._vocabulary.embed(torch.tensor([3, 90, 3]))  # type: ignore[attr-defined]
    assert torch.equal(embedded, values.dequantize(torch.device("cpu"), torch.float32)[[3, 90, 3]])
