"""A CPU's weights and its KV cache lie where the kernel may give huge pages: private memory that was advised so."""

import errno
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.executor.kernels.cpu_ops import levels
from penstock.executor.kernels.cpu_product import CpuProduct
from penstock.executor.kernels.weight import plain_weight
from penstock.executor.step.memory import allocate_kv
from penstock.executor.weight_memory import ALIGNMENT, REGION, allocate
from tests.support.coded import coded

SMAPS = Path("/proc/self/smaps")


def mapping_of(address: int) -> tuple[str, set[str]]:
    """Return the permissions and flags of the mapping at an address."""
    found = ""
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, end = (int(each, 16) for each in words[0].split("-"))
            found = words[1] if first <= address < end else ""
        elif found and words[0] == "VmFlags:":
            return found, set(words[1:])
    raise AssertionError("it lies nowhere")


@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
@pytest.mark.skipif(levels()[-1] == "portable", reason="torch computes such weights")
def test_weights_and_cache_are_in_private_memory_advised_to_have_huge_pages() -> None:
    weight, _ = coded(np.random.default_rng(0), (64, 512), "Q4_1")
    tensors = [
        CpuProduct([weight], torch.float32).weights[0].codes,
        CpuProduct([plain_weight(torch.zeros(64, 512))], torch.float32).weights[0].codes,
        allocate_kv(64, 2, 2, 16, 64, torch.float32, torch.device("cpu")),
    ]
    for tensor in tensors:
        permissions, flags = mapping_of(tensor.data_ptr())
        assert permissions == "rw-p", "shared memory has huge pages only where an administrator allows it"
        assert "hg" in flags


class WithoutHugePages(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("kind", [mmap.mmap, WithoutHugePages])
def test_pieces_are_zero_aligned_and_apart(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", kind)
    pieces = [allocate(size) for size in (1, 65, 4096, REGION // 2, REGION // 2 + 1, REGION // 2, 7)]
    assert not any(any(piece[:4096]) or any(piece[-4096:]) for piece in pieces)
    for number, piece in enumerate(pieces):
        assert torch.frombuffer(piece, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0
        piece[:] = bytes([number]) * len(piece)
    assert all(piece[0] == piece[-1] == number for number, piece in enumerate(pieces))


def test_a_region_goes_with_the_last_piece_in_it() -> None:
    pieces = [allocate(REGION // 2) for _ in range(3)]
    last = allocate(64)
    region = weakref.ref(last.obj)
    assert pieces[-1].obj is region()
    pieces.clear()
    assert allocate(64).obj is region() is not None
    del last
    assert region() is None
