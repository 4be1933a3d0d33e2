"""`penstock serve --dry-run` prints what a start would allocate."""

import re
from typing import Any

import pytest

from penstock import executors
from penstock.cli import main
from tests.support.checkpoints import config_of, executor_of
from tests.support.stored_models import stored


def number(line: str, before: str) -> float:
    found = re.search(rf"([\d,.]+){before}", line)
    assert found is not None, line
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5", "deepseek-v3", "gguf/mixed"])
def test_a_preview_has_the_sizes_of_a_start(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = stored(name)
    options: dict[str, Any] = {"kv_cache_bytes": 2**22, "block_size": 8, "dtype": "auto"}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["serve", str(path), "--dry-run", "--max-num-seqs", "16", *words]) == 0
    first, *_, cache, blocks, request, longest = capsys.readouterr().out.splitlines()

    executor = executor_of(path, **options)
    info, block_bytes = executor.info, executor.info.block_bytes
    executor.close()
    assert first == f"{info.architecture} on cpu"
    assert number(cache, " MiB") == round(info.num_blocks * block_bytes / 2**20)
    assert number(blocks, " blocks") == info.num_blocks - 1
    assert number(longest, " tokens") == info.max_model_len
    pages = sum(each.most_pages(int(number(request, " tokens")), 2048, 8) for each in info.groups)
    assert number(request, " MiB") == pytest.approx(pages * block_bytes / 2**20, abs=0.06)
    assert number(request, " fit") == (info.num_blocks - 1) // pages
    preview = executors.preview(config_of(path, **options))
    assert (preview.dtype, preview.memory["KV cache"]) == (info.dtype, info.memory["KV cache"])
    stored_bytes = sum(size for kind, size in info.memory.items() if "weights" in kind)
    assert preview.memory["weights"] == pytest.approx(stored_bytes, rel=0.1, abs=0.06 * 2**20)


def test_a_preview_of_several_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(stored("llama")[0]), "--dry-run", "--tensor-parallel-size", "2"]) == 2
    assert "dry_run: given with several ranks" in capsys.readouterr().err
