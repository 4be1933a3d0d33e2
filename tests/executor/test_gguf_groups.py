"""GGUF files where a GPU computes them as codes, against transformers over the values of the file."""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_coded_models import PROMPT, config
from tests.executor.test_gguf import HIDDEN, INNER, loaded, metadata, random_model, shapes, write
from tests.executor.test_packed_weights import as_on_a_gpu
from tests.support.coded import packed
from tests.support.driver import Driver


@pytest.mark.parametrize(
    "kinds",
    [["Q4_0", "Q8_0"], ["Q4_K", "Q4_K", "Q6_K"], ["Q4_K", "Q5_K"], ["Q2_K", "Q3_K"], ["Q5_0", "IQ4_NL", "Q5_1"]],
)
def test_tokens_are_those_of_transformers(kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of neighbours in one layer differ, as those of queries and values do in files that people have. Scales of
    the K types are rounded to 16 bits, which after more tokens tips a near tie."""
    as_on_a_gpu(monkeypatch)
    rng, of = np.random.default_rng(4), cycle(kinds)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, shape in shapes().items():
        kind = next(of) if len(shape) == 2 else "F32"
        tensors[name] = packed(rng, shape, kind, 0.06) if len(shape) == 2 else np.ones(shape, np.float32), kind
    file = write(tmp_path / "model.gguf", "llama", metadata(), tensors)
    like = random_model("llama", {"tie_word_embeddings": False, "hidden_size": HIDDEN, "intermediate_size": INNER})
    oracle = loaded(GgufCheckpoint(file), like)
    tokens = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    expected = tokens[0, len(PROMPT) :].tolist()
    driver = Driver(UniprocExecutor(config(file, dtype="float32")))
    memory = driver.executor.info.memory
    assert "coded weights as float32" not in memory and memory["weights as codes"] > 0
    assert driver.generate(driver.admit(PROMPT), count=8) == [expected]
