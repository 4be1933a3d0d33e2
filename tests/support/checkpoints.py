"""Opens executors over small models, edits copies of checkpoints, and returns the messages of refused ones."""

import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.kernels import Ops
from penstock.executor.process_life import ChildProcess
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.ranks.ranked import RankedExecutor, open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.support.small_models import folder
from tests.support.twins import changed, eight_bits, torch_ops
from tests.support.twins.experts import fused_experts

WEIGHTS = "model.safetensors"
# [model, changes, words of the message, which may leave out some at "…"] in each section.
REFUSED: dict[str, list[list[Any]]] = json.loads(Path(__file__).with_name("refused.json").read_text())


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(160) for _ in range(rng.randint(low, high))] for _ in range(count)]


def config_of(model: str | Path, ranks: int = 1, **options: Any) -> ExecutorConfig:
    """Return a configuration for a small model by its name, or for the model in a path."""
    path = model if isinstance(model, Path) else folder(model)
    given = {"kv_cache_bytes": 2**22, "block_size": 8, "dtype": "float32", "max_num_seqs": 16, **options}
    return ExecutorConfig(model=str(path), tensor_parallel_size=ranks, **given)


def executor_of(model: str | Path, **options: Any) -> UniprocExecutor:
    return UniprocExecutor(config_of(model, **options))


@contextmanager
def running(config: ExecutorConfig, **options: Any) -> Iterator[RankedExecutor]:
    """Open the ranks of a model as processes; all of them have ended afterwards."""
    with closing(open_multiproc(config, **options)) as executor:
        yield executor
    assert None not in exit_codes(executor)


def exit_codes(executor: RankedExecutor) -> list[int | None]:
    children = [worker for worker in executor.worker_watch.workers if isinstance(worker, ChildProcess)]
    assert len(children) == len(executor.worker_watch.workers)
    return [child._popen.returncode for child in children]


def copied(model: str | Path, goal: Path) -> Path:
    return Path(shutil.copytree(model if isinstance(model, Path) else folder(model), goal))


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(path: Path, changes: Mapping[str, torch.Tensor | None], file: str = WEIGHTS) -> None:
    """Change or add tensors; None removes one."""
    tensors = load_file(path / file) | changes
    (path / file).unlink()  # it may be mapped
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / file, metadata={"format": "pt"})


def tensor_of(row: Any) -> torch.Tensor | None:
    """Return the tensor that a row of refused.json gives as its dtype, its shape, and one number or all of them."""
    if row is None:
        return None
    dtype, shape, numbers = row
    return torch.empty(shape).copy_(torch.tensor(numbers)).to(getattr(torch, dtype))


def refusal(path: Path, **options: Any) -> str:
    """Return the one line that a model which cannot run is refused with."""
    with pytest.raises(ExecutorError) as caught:
        executor_of(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def has_words(message: str, words: str) -> bool:
    return re.search(".*".join(map(re.escape, words.split("…"))), message) is not None


def compute_with(patch: pytest.MonkeyPatch, ops: Ops) -> None:
    """Let models that are opened from now on compute with these operations, and repack no weights for a CPU."""
    patch.setattr("penstock.executor.models.load.select_ops", lambda *_: ops)
    patch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)


def compute_codes_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let models keep the codes that the kernels of a GPU take, and compute with the kernels' twins."""
    compute_with(patch, changed(torch_ops, has_packed=True, fused_experts=fused_experts, blocks=eight_bits))
    patch.setattr("penstock.executor.models.load.has_vectors", lambda: True)


def compute_without_vectors(patch: pytest.MonkeyPatch) -> None:
    """Compute as on a CPU without AVX2, of ARM for one: torch multiplies, and codes become numbers when they are loaded."""
    for module in ("kernels.cpu_product", "models.load"):
        patch.setattr(f"penstock.executor.{module}.has_vectors", lambda: False)
    patch.setattr("penstock.executor.kernels.cpu_ops.levels", lambda: ["portable"])
