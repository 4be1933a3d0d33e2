"""How many cores and how much memory there are: the affinity mask, and the limits of the control group. A CPU's weights and its KV
cache lie where the kernel may give huge pages: private memory that was advised so."""

import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.executor.kernels.cpu_ops import describe_cpu, levels
from penstock.executor.kernels.cpu_product import CpuProduct
from penstock.executor.kernels.weight import plain_weight
from penstock.executor.machine import available_memory, usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks import rank_builder
from penstock.executor.step.memory import allocate_kv
from penstock.executor.uniproc import UniprocExecutor
from penstock.executor.weight_memory import ALIGNMENT, REGION, allocate
from tests.support.coded import coded
from tests.support.gguf_files import small_file
from tests.support.refusals import cases


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))


def written(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write the files of control groups, and of this process's membership; return both places."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder, folder / "membership"


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(("membership", "files", "cores"), cases(__file__, "cpu quotas"))
def test_a_cpu_quota_is_like_missing_cores(tmp_path: Path, membership: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(*written(tmp_path, membership, files)) == cores


def test_without_control_groups_the_affinity_decides(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "absent") == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("two_threads")
def test_the_team_of_a_model_is_no_larger_than_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr(rank_builder, "usable_cores", lambda: 2)
    UniprocExecutor(ExecutorConfig(model=str(small_file(tmp_path / "model.gguf")), kv_cache_bytes=1 << 20))
    assert torch.get_num_threads() == 2
    assert describe_cpu(torch.float32, None, None).num_threads == 2


STAT = "anon 1000000\nactive_file 3000000\ninactive_file 4500000\n"
STAT_OF_ALL_BELOW = "active_file 0\ninactive_file 0\ntotal_active_file 3000000\ntotal_inactive_file 4500000\n"


def group(path: str, limit: str, version: int = 2) -> dict[str, str]:
    """Return the files of a group that takes 9 MB, of which 7.5 MB are page cache."""
    if version == 1:
        files = {"limit_in_bytes": limit, "usage_in_bytes": "9000000\n", "stat": STAT_OF_ALL_BELOW}
    else:
        files = {"max": limit, "current": "9000000\n", "stat": STAT}
    return {f"{path}memory.{name}": text for name, text in files.items()}


@pytest.mark.parametrize(("membership", "files", "free"), cases(__file__, "memory limits", group=group))
def test_a_groups_page_cache_counts_as_free(tmp_path: Path, membership: str, files: dict[str, str], free: int) -> None:
    assert available_memory(*written(tmp_path, membership, files)) == free


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(*written(tmp_path, "0::/", group("", "max"))) > 10_000_000
    assert available_memory(tmp_path, tmp_path / "absent") > 10_000_000


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
