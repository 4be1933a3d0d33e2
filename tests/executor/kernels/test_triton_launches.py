"""How many launches a layer of a decoding step is: at few rows they, not bytes, are what a step takes.

Counted as what a third layer adds to two. A graph replays exactly these.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import cases
from benchmarks.gpu.batches import make_batch
from benchmarks.gpu.shapes import config_of

from penstock.executor.kernels.cuda import few_rows, linear_products
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import compute_with
from tests.support.kernel_cases import triton_kernels
from tests.support.launch_counts import launches
from tests.support.refusals import hardest_rows

LARGE = {"PREFETCH_BYTES": 0}  # all weights count as too large to be prefetched, as those of an 8B model are
CASES: list[tuple[str, dict[str, Any], int]] = [
    *(("qwen3-0.6b", options, most) for options, most in (({}, 6), (LARGE, 9), (LARGE | {"EVERY_SIZE": True}, 6))),
    *(("qwen3-30b-a3b", {}, 11), ("deepseek-v2-lite", {}, 14)),
]
LONGEST = 512


@pytest.mark.parametrize(("name", "options", "most"), hardest_rows(CASES, CASES[-1:]))
def test_a_layer_of_a_decoding_step_has_few_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: dict[str, Any], most: int
) -> None:
    for option, value in options.items():
        monkeypatch.setattr(few_rows, option, value)
    compute_with(monkeypatch, OPS)
    counts = [count(tmp_path, config_of(name, True) | {"num_hidden_layers": layers}) for layers in (2, 3)]
    layer = counts[1] - counts[0]
    assert layer.total() == most, layer


def test_codes_are_dequantized_once_for_all_rows_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_products, "PIECE_BYTES", 1 << 18)
    kit = cases.Kit(torch.device("cpu"), torch.bfloat16, is_empty=True)
    (case,) = cases.product(kit, "", 512, (512, 512), cases.packed)
    with launches() as names:
        case.call(triton_kernels(kit.device))
    assert names[-4:] == ["dequantize_piece", "mm"] * 2 and "_multiply" not in names


def count(folder: Path, config: dict[str, Any]) -> Counter[str]:
    """Count the launches of a step whose rows may have long contexts, as far as is known when a graph is captured."""
    (folder / "config.json").write_text(json.dumps(config))
    runner = UniprocExecutor(
        ExecutorConfig(model=str(folder), device="cpu", dtype="bfloat16", load_format="dummy", kv_cache_bytes=2**20)
    )._rank.runner
    batch = make_batch([(1, 4), (1, 21)], torch.device("cpu"), LONGEST)
    with torch.inference_mode(), launches() as names:
        runner._model.forward(batch, runner._pages)
    return Counter(names)
