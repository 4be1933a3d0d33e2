"""How many cores and how much memory there are: the affinity mask, and the limits of the control group."""

import os
from pathlib import Path

import pytest
import torch

from penstock.executor.kernels.cpu_ops import describe_cpu
from penstock.executor.machine import available_memory, usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.ranks import rank
from penstock.executor.uniproc import UniprocExecutor
from tests.support.gguf_files import small_file
from tests.support.refusals import cases


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
    cases(__file__, "cpu quotas"),
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


def group(path: Path, limit: str) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text("9000000\n")
    (path / "memory.stat").write_text("anon 1000000\nactive_file 3000000\ninactive_file 4500000\nshmem 500000\n")
    return path


def test_a_control_group_s_page_cache_counts_as_free(tmp_path: Path) -> None:
    assert available_memory(group(tmp_path, "10000000")) == 10_000_000 - 1_500_000


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert available_memory(group(tmp_path, "1000")) == 0


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert available_memory(group(tmp_path, "max")) > 10_000_000
    assert available_memory(tmp_path / "absent") > 10_000_000
