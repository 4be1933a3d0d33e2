"""How many cores there are: the affinity mask, and the CPU quota of the control group in both of its versions."""

import os
from pathlib import Path

import pytest
import torch

from penstock.executor.kernels.cpu_ops import describe_cpu
from penstock.executor.machine import usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks import rank
from penstock.executor.uniproc import UniprocExecutor
from tests.support.gguf_files import small_file


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))


def counted(folder: Path, membership: str, files: dict[str, str]) -> int:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return usable_cores(folder, folder / "membership")


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "max 100000\n"}, 4),
        ("4:memory:/a\n1:cpu:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 2),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_cpu_quota_counts_like_missing_cores(
    tmp_path: Path, membership: str, files: dict[str, str], cores: int
) -> None:
    assert counted(tmp_path, membership, files) == cores


def test_without_control_groups_the_affinity_decides(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "absent") == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("two_threads")
def test_the_team_of_a_model_is_no_larger_than_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr(rank, "usable_cores", lambda: 2)
    UniprocExecutor(ExecutorConfig(model=str(small_file(tmp_path / "model.gguf")), kv_cache_bytes=1 << 20))
    assert torch.get_num_threads() == 2
    assert describe_cpu(torch.float32, None, None).num_threads == 2
