"""Blocks that are computed again, under the real default model: a flipped byte in any tier is found, and no answer is wrong."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.cache.tiers.disk.record import HEADER_BYTES, MAGIC, read_header, write_header
from penstock.engine.core.scheduler import Scheduler
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.tiers.transfers import RankTransfers
from penstock.executor.uniproc import UniprocExecutor
from tests.support.default_file import needs_model
from tests.support.small_models import folder
from tests.test_tiers import answers, engine, prompts

pytestmark = [needs_model, pytest.mark.timeout(600)]
TEXTS = prompts(3)


@pytest.fixture(scope="module")
def cold() -> list[list[int]]:
    with engine() as llm:
        return answers(llm, TEXTS)[0]


@contextmanager
def verifying(**options: Any) -> Iterator[LLM]:
    with engine(verify_blocks=1, **options) as llm:
        yield llm


def scheduler_of(llm: LLM) -> Scheduler:
    return llm._running().scheduler


def rank_of(llm: LLM) -> Any:
    executor = llm._running().executor
    assert isinstance(executor, UniprocExecutor)
    return executor._rank


def leave_the_device(llm: LLM) -> None:
    llm._running().settle()
    pool = scheduler_of(llm).pool
    pool.drop(pool.cached_keys())


def found(llm: LLM, tier: str) -> float:
    return llm.get_metrics().get(f"kv_{tier}_differing_blocks", 0.0)


def right_again(llm: LLM, cold: list[list[int]], tier: str, caplog: pytest.LogCaptureFixture) -> None:
    """Something is wrong with the first prompt's blocks. It is drawn at last, and until then it may not have mattered."""
    for _ in range(40):
        leave_the_device(llm) if tier != "device" else None
        found_before = found(llm, tier)
        tokens, _ = answers(llm, TEXTS[:1])
        if found(llm, tier) > found_before:
            break
    assert found(llm, tier) == 1 and tokens == cold[:1], "the request that finds it"
    assert f"which came from {tier}" in caplog.text
    assert answers(llm, TEXTS)[0] == cold, "those after it"
    leave_the_device(llm)
    assert answers(llm, TEXTS)[0] == cold and found(llm, tier) == 1


def test_a_flipped_byte_in_the_hosts_memory(cold: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with verifying(kv_host_bytes="64MiB") as llm, caplog.at_level(logging.ERROR, "penstock.engine"):
        answers(llm, TEXTS[:1])
        leave_the_device(llm)
        transfers, scheduler = rank_of(llm)._tiers.transfers, scheduler_of(llm)
        assert isinstance(transfers, RankTransfers) and scheduler.tiers is not None
        assert answers(llm, TEXTS[:1])[0] == cold[:1]
        assert llm.get_metrics()["kv_host_verified_blocks"] > 0 and found(llm, "host") == 0
        ours = list(scheduler.tiers.index.host._index.values())
        transfers._arena[ours, 1001] ^= 0x40
        right_again(llm, cold, "host", caplog)


def test_a_flipped_byte_on_the_disk_under_a_checksum_that_is_right(
    cold: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"kv_host_bytes": "6MiB", "kv_disk_path": str(tmp_path), "kv_disk_bytes": "1GiB"}
    with verifying(**options) as llm:
        answers(llm, TEXTS[:1])
    assert sum(map(forge, tmp_path.rglob("*"))) > 3
    with verifying(**options) as llm, caplog.at_level(logging.ERROR, "penstock.engine"):
        right_again(llm, cold, "disk", caplog)


def forge(path: Path) -> int:
    """Flip a byte of every record of a file and sign it again; how many there were."""
    data, count = bytearray(path.read_bytes() if path.is_file() else b""), 0
    place = data.find(MAGIC)
    while place >= 0:
        header = read_header(data[place:])
        if header is not None:
            payload = memoryview(data)[place + HEADER_BYTES :][: header.length]
            payload[1001] ^= 0x40
            write_header(memoryview(data)[place:], header.namespace, header.key, header.sequence, payload)
            payload.release()
            count += 1
        place = data.find(MAGIC, place + HEADER_BYTES)
    if count:
        path.write_bytes(data)
    return count


def test_a_flipped_byte_in_a_block_of_the_device(cold: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing lies beneath it."""
    with verifying() as llm, caplog.at_level(logging.ERROR, "penstock.engine"):
        answers(llm, TEXTS[:1])
        pool = scheduler_of(llm).pool
        blocks = list(pool._index.values())
        kept = rank_of(llm).kv.view(-1).untyped_storage()
        size = len(kept) // pool.num_blocks
        for block in blocks[:1]:
            kept[int(block) * size + 1001] ^= 0x40
        right_again(llm, cold, "device", caplog)


@pytest.mark.slow
def test_over_ranks_each_compares_its_part(cold: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """Of a prompt that was computed as a whole, and an answer that was not."""
    with verifying(tensor_parallel_size=3, kv_host_bytes="64MiB", executor="multiproc") as llm:
        first, _ = answers(llm, TEXTS[:1], max_tokens=20)
        for _ in range(3):
            leave_the_device(llm)
            assert answers(llm, TEXTS[:1], max_tokens=20)[0] == first
        metrics = llm.get_metrics()
        assert metrics["kv_host_verified_blocks"] == 3 and metrics["kv_host_differing_blocks"] == 0
    assert first[0][:1] == cold[0][:1] and not caplog.text


def test_a_model_with_windows_is_refused_by_name() -> None:
    config = ExecutorConfig(model=str(folder("gemma3")), block_size=8, kv_cache_bytes=2**22, verify_blocks=9)
    with pytest.raises(ExecutorError, match="^verify_blocks: 9 given; .* keeps windows or states"):
        UniprocExecutor(config)
