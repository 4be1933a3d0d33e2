"""Weights that are packed while torch is imported: the same bytes, and only where they are computed as codes."""

import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock import _csrc
from penstock.executor.code_types import has_vectors
from penstock.executor.gguf_header import GgufFile, TensorEntry, open_gguf
from penstock.executor.kernels.cpu_ops import describe_cpu
from penstock.executor.kernels.cpu_product import pack_codes
from penstock.executor.kernels.weight import Ggml, Weight
from penstock.executor.loading import ahead
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.support.gguf_files import small_file
from tests.support.programs import printed

pytestmark = pytest.mark.skipif(not has_vectors(), reason="without AVX2 codes become numbers")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "GPU_FILES", ())


def packed(path: Path) -> GgufFile:
    """With all that can be packed ahead."""
    with ahead.packing(ExecutorConfig(model=str(path))) as file:
        assert file is not None
        for thread in threading.enumerate():
            if thread.name == "ahead":
                thread.join()
    return file


def columns() -> int:
    return int(_csrc.lib.penstock_coded_columns(describe_cpu(torch.float32, 1, None).level))


def packed_by_the_loader(weight: Weight, rows: int) -> torch.Tensor:
    assert isinstance(weight.format, Ggml)
    return pack_codes(weight.format.type, weight, rows)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_what_is_packed_ahead_has_the_bytes_that_the_loader_would_make(tmp_path: Path, kind: str) -> None:
    path = small_file(tmp_path / "model.gguf", kind=kind)
    found, plain = open_checkpoint(path, file=packed(path)), open_checkpoint(path)
    seen = 0
    for name in plain.names():
        given, alone = found.read(name), plain.read(name)
        if isinstance(given, Weight) and given.panels is not None:
            assert isinstance(alone, Weight) and alone.panels is None
            assert torch.equal(packed_by_the_loader(given, columns()), packed_by_the_loader(alone, columns()))
            seen += 1
    assert seen


def test_rows_in_another_order_and_parts_of_a_weight_are_packed_by_the_loader(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    file = packed(path)
    assert not [name for name in file.packed if "attn_q" in name or "attn_k" in name]
    whole = open_checkpoint(path, file=file).read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(whole, Weight) and whole.panels is not None
    assert whole.narrow(0, 0, 8).panels is None
    fresh = whole._replace(panels=None)
    assert torch.equal(packed_by_the_loader(whole, 4), packed_by_the_loader(fresh, 4))  # of other columns


def test_a_model_packed_ahead_has_the_same_fingerprint_and_memory(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    config = ExecutorConfig(model=str(path), kv_cache_bytes=1 << 20)
    infos = []
    for file in (None, packed(path)):
        executor = UniprocExecutor(config, file=file)
        infos.append(executor.info)
        executor.close()
    assert infos[0] == infos[1]


def test_a_scale_that_is_not_finite_is_named_by_the_loader(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    entry: TensorEntry = open_gguf(path).tensors["token_embd.weight"]
    content = np.fromfile(path, dtype=np.uint8)
    content[entry.offset : entry.offset + 2] = (0x00, 0x7C)  # an infinite scale in float16
    content.tofile(path)
    file = packed(path)
    assert "token_embd.weight" not in file.packed and file.packed
    with pytest.raises(ExecutorError, match=r"token_embd.weight.*scale"):
        UniprocExecutor(ExecutorConfig(model=str(path)), file=file)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: ExecutorConfig(model=str(path), dtype="float32"),
        lambda path: ExecutorConfig(model=str(path), device="cuda"),
        lambda path: ExecutorConfig(model=str(path), load_format="dummy"),
        lambda path: ExecutorConfig(model=str(path / "none.gguf")),
    ],
)
def test_nothing_is_packed_that_is_not_computed_as_codes_here(
    tmp_path: Path, change: Callable[[Path], ExecutorConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_file(tmp_path / "model.gguf")
    with ahead.packing(change(path)) as file:
        assert file is None
    monkeypatch.setattr(ahead, "GPU_FILES", (str(path),))  # there may be a GPU
    for config, is_packed in (
        (ExecutorConfig(model=str(path)), False),
        (ExecutorConfig(model=str(path), device="cpu"), True),
    ):
        with ahead.packing(config) as file:
            assert (file is not None) == is_packed


def test_memory_that_does_not_suffice_is_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_file(tmp_path / "model.gguf")
    file = open_gguf(path)
    monkeypatch.setattr(ahead, "open_gguf", lambda _: file)
    monkeypatch.setattr(ahead, "allocate", Mock(side_effect=OSError(12, "Cannot allocate memory")))
    with ahead.packing(ExecutorConfig(model=str(path))):
        pass
    assert file.packed == {}


IN_A_FRESH_PROCESS = """
import sys
from penstock.executor.protocol import ExecutorConfig
from penstock.executors import open_executor
from penstock.executor.loading import ahead
ahead.GPU_FILES = ()
executor = open_executor(ExecutorConfig(model=sys.argv[1], kv_cache_bytes=1 << 20))
print(executor.info.fingerprint.hex())
"""


@pytest.mark.slow
def test_a_fresh_process_comes_to_the_same_model(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    here = UniprocExecutor(ExecutorConfig(model=str(path), kv_cache_bytes=1 << 20)).info.fingerprint.hex()
    assert printed(IN_A_FRESH_PROCESS, path) == here
