"""How much memory there is, and how it is shared out."""

from pathlib import Path

import torch

from penstock.executor.machine import available_memory
from penstock.executor.step.memory import allocate_kv


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


def test_a_block_holds_all_its_layers_side_by_side_and_starts_as_zeros() -> None:
    kv = allocate_kv(5, 3, 2, 16, 32, torch.bfloat16, torch.device("cpu"))
    assert kv.shape == (5, 3, 2, 16, 32) and kv.is_contiguous()
    assert not kv.any()
    assert kv[1].is_contiguous() and kv[:, 2, 1].stride() == (3 * 2 * 16 * 32, 32, 1)
