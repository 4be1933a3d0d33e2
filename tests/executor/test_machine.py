"""How many cores and how much memory there are: the affinity mask, and the limits of the control group."""

import os
from pathlib import Path

import pytest
import torch

from penstock.executor.kernels.cpu_ops import describe_cpu
from penstock.executor.machine import available_memory, usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks import rank_builder
from penstock.executor.uniproc import UniprocExecutor
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
