"""How many launches a layer of a decoding step is: at few rows they, not bytes, are what a step takes.

Counted as what a third layer adds to two. A graph replays exactly these.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.shapes import config_of

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda import few_rows
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import compute_with
from tests.support.launch_counts import launches
from tests.support.refusals import hardest

MOST = {"qwen3-0.6b": 6, "qwen3-30b-a3b": 11, "deepseek-v2-lite": 14}
ROWS, BLOCK_SIZE, LONGEST = 2, 16, 512


@pytest.mark.parametrize("name", hardest(MOST, "deepseek-v2-lite"))
def test_a_layer_of_a_decoding_step_has_few_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    compute_with(monkeypatch, OPS)
    counts = [count(tmp_path, config_of(name, True) | {"num_hidden_layers": layers}) for layers in (2, 3)]
    layer = counts[1] - counts[0]
    assert layer.total() <= MOST[name], layer


@pytest.mark.parametrize(("every_size", "most"), [(False, 9), (True, 6)])
def test_products_of_large_weights_fuse_norms_and_gate_if_those_of_every_size_are_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every_size: bool, most: int
) -> None:
    """Weights that are too large to be prefetched, as those of an 8B model are."""
    monkeypatch.setattr(few_rows, "PREFETCH_BYTES", 0)
    monkeypatch.setattr(few_rows, "EVERY_SIZE", every_size)
    compute_with(monkeypatch, OPS)
    counts = [count(tmp_path, config_of("qwen3-0.6b", True) | {"num_hidden_layers": layers}) for layers in (2, 3)]
    assert (counts[1] - counts[0]).total() == most


def count(folder: Path, config: dict[str, Any]) -> Counter[str]:
    """What one step launches whose rows, by what is known when a graph is captured, may have long contexts."""
    (folder / "config.json").write_text(json.dumps(config))
    runner = UniprocExecutor(
        ExecutorConfig(model=str(folder), device="cpu", dtype="bfloat16", load_format="dummy", kv_cache_bytes=2**20)
    )._rank.runner
    batch = ForwardBatch(
        tokens=torch.tensor([5, 7], dtype=torch.int32),
        positions=torch.tensor([3, 20], dtype=torch.int32),
        kv_cells=torch.tensor([BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 4]),
        query_starts=torch.arange(ROWS + 1, dtype=torch.int32),
        context_lens=torch.tensor([4, 21], dtype=torch.int32),
        block_tables=torch.ones(ROWS, LONGEST // BLOCK_SIZE, dtype=torch.int32),
        output_indices=None,
        num_single_rows=ROWS,
        query_lens=(),
        query_contexts=(),
        max_single_context=LONGEST,
    )
    with torch.inference_mode(), launches() as names:
        runner._model.forward(batch, runner._pages)
    return Counter(names)
