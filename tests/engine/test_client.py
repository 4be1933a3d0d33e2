"""The core process over its sockets, with the oracle executor: requests, aborts, deaths and stalls."""

import asyncio
import contextlib
import gc
import io
import os
import signal
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, astuple

from penstock.engine.config import ConfigError, SchedulerConfig
from penstock.engine.front import adapter_files, liveness
from penstock.engine.front.answer import Answer, Update, joined
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.engine import EngineDead, QueueFull
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import Heartbeat, Outputs, Stats
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.process_life import ChildProcess
from penstock.executor.protocol import AdapterError
from tests.support.oracle_engine import oracle_engine
from tests.support.programs import EndlessProgram, all_gone
from tests.support.running_server import comes_true
from tests.support.simulation import alone, submit

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)


def make(**executor: Any) -> AsyncEngine:
    return oracle_engine(50, **{"max_model_len": 1_000_000, **executor})


@contextlib.asynccontextmanager
async def running(engine: AsyncEngine | None = None) -> AsyncIterator[AsyncEngine]:
    engine = engine or make()
    await engine.start()
    try:
        yield engine
        engine.answers.check()
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner) -> Iterator[AsyncEngine]:
    """Start an engine for tests that leave it idle."""
    engine = make()
    runner.run(engine.start())
    yield engine
    engine.answers.check()
    runner.run(engine.close())


async def read(answer: Answer) -> dict[int, Update]:
    parts: dict[int, list[Update]] = {}
    async for updates in answer:
        answer.check()
        for update in updates:
            parts.setdefault(update.index, []).append(update)
    return {index: joined(updates) for index, updates in parts.items()}


async def test_a_request_gets_the_tokens_of_the_model_and_every_choice_its_own(engine: AsyncEngine) -> None:
    prompt = [1, 2, 3, 4, 5]
    greedy = await read(engine.generate(prompt, GREEDY))
    assert greedy[0].token_ids == alone(submit("a", prompt))[0] and greedy[0].finish_reason == "length"
    assert greedy[0].text == "", "a text that was not wanted"
    params = SamplingParams(n=3, seed=7, max_tokens=5, detokenize=False)
    choices = await read(engine.generate(prompt, params))
    assert sorted(choices) == [0, 1, 2] and len({tuple(c.token_ids) for c in choices.values()}) == 3
    again = await read(engine.generate(prompt, params))
    assert {i: c.token_ids for i, c in again.items()} == {i: c.token_ids for i, c in choices.items()}
    assert len(engine.answers) == 0


async def test_an_abort_frees_the_blocks_long_before_the_answer_would_have_ended(engine: AsyncEngine) -> None:
    before = engine.stats.generation_tokens
    answer = engine.generate([1, 2, 3], SamplingParams(max_tokens=2_000_000, detokenize=False))
    assert answer.messages[0].max_tokens == 1_000_000 - 3, "an answer ends where the context does"
    await anext(answer)
    answer.abort()
    last = [updates async for updates in answer][-1][0]
    assert last.finish_reason == "abort"
    await comes_true(lambda: engine.stats.num_used_blocks == 0)
    assert engine.stats.generation_tokens - before < 450_000


async def test_a_full_queue_says_when_to_come_back_and_more_than_it_holds_never_fits() -> None:
    async with running(make(scheduler=SchedulerConfig(max_num_seqs=2, max_queued_requests=3))) as engine:
        with pytest.raises(InvalidRequest, match="6 sequences requested; this server allows 5 at a time"):
            engine.admit(6)
        engine.admit(5)
        with pytest.raises(QueueFull, match="^1 sequences are in flight"):
            engine.admit(5, 1)
        long = SamplingParams(max_tokens=100_000, detokenize=False)
        answers = [engine.generate([1], long) for _ in range(5)]
        with pytest.raises(QueueFull) as full:
            engine.admit()
        assert full.value.retry_after_s >= 1
        for answer in answers:
            answer.abort()
        await comes_true(lambda: len(engine.answers) == 0)
        engine.admit()


def pid_of(engine: AsyncEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


async def test_a_killed_core_ends_every_request_with_an_error_that_says_so() -> None:
    async with running() as engine:
        answers = [engine.generate([1], SamplingParams(max_tokens=900_000, detokenize=False)) for _ in range(3)]
        await anext(answers[0])
        os.kill(pid_of(engine), signal.SIGKILL)
        for answer in answers:
            last = (await read(answer))[0]
            assert last.finish_reason == "error" and "SIGKILL" in str(answer.error)
        health = engine.health()
        assert not health.alive and "SIGKILL" in health.reason
        with pytest.raises(EngineDead):
            engine.generate([1], GREEDY)


async def test_only_a_core_beyond_a_deadline_is_killed_at_once() -> None:
    for overdue_s, code in ((12.0, -signal.SIGKILL), (0.0, 0)):
        async with running() as engine:
            process = engine._process
            assert process is not None
            engine._receive(Heartbeat(overdue_s))
            await engine.close()
            assert process._popen.returncode == code


async def test_the_loop_serves_others_while_a_dead_core_slowly_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def death(process: ChildProcess) -> str:
        threads.append(threading.current_thread())
        return "has left"

    monkeypatch.setattr(ChildProcess, "death", death)
    async with running() as engine:
        answer = engine.generate([1], SamplingParams(max_tokens=900_000, detokenize=False))
        os.kill(pid_of(engine), signal.SIGKILL)
        await read(answer)
        assert "has left" in str(answer.error)
    assert threads and threading.main_thread() not in threads


async def test_a_stopped_core_is_unhealthy_and_its_requests_end_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.front.client.STOP_GRACE_S", 0.1)
    async with running() as engine:
        monkeypatch.setattr(liveness, "SILENCE_S", 0.5)
        answer = engine.generate([1], SamplingParams(max_tokens=900_000, detokenize=False))
        os.kill(pid_of(engine), signal.SIGSTOP)
        await comes_true(lambda: not engine.health().alive)
        os.kill(pid_of(engine), signal.SIGCONT)
        await comes_true(lambda: engine.health().alive)
        os.kill(pid_of(engine), signal.SIGSTOP)
        await comes_true(lambda: not engine.health().alive)
        reason = engine.health().reason
        assert "silent" in reason and reason.endswith("its process is stopped")
        await engine.close(reason)
        await read(answer)
        assert answer.error == reason


async def test_an_adapter_file_that_blocks_is_refused_and_holds_up_no_request(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    async with running(make(max_model_len=4096, enable_lora=True)) as engine, asyncio.timeout(60.0):
        with pytest.raises(AdapterError, match="adapter_config.json: not a regular file"):
            await engine.load_adapter(str(tmp_path))
        assert (await read(engine.generate([1, 2], GREEDY)))[0].finish_reason == "length"


async def test_signals_for_the_process_group_leave_the_core_to_its_parent(engine: AsyncEngine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(engine), number)
    assert (await read(engine.generate([1, 2], GREEDY)))[0].finish_reason == "length"


async def test_the_counters_of_a_new_engine_are_those_of_its_requests() -> None:
    async with running() as engine:
        await comes_true(lambda: engine.stats.num_blocks == 65535)
        assert sum(map(bool, asdict(engine.stats).values())) == 1
        steps: list[Outputs] = []
        engine.on_step = steps.append
        await read(engine.generate([1, 2, 3, 4, 5], GREEDY))
        counted = asdict(engine.stats)
    assert [step.step_tokens for step in steps] == [5, *[1] * 7]
    assert counted.pop("num_blocks") and counted.pop("step_s") >= 0
    assert not any(astuple(Stats()))
    tokens = {"prefix_queries": 5, "prompt_tokens": 5, "generation_tokens": 8}
    assert {name: count for name, count in counted.items() if count} == {"num_steps": 8, **tokens}


async def test_figures_of_the_tiers_outlive_a_step_without_them() -> None:
    async with running(make(max_model_len=64, kv_cache_bytes=10 * 16 * 8, kv_host_bytes=2**20)) as engine:
        for _ in range(2):
            for first in range(8):  # more than the device keeps
                await read(engine.generate([first, *range(40)], GREEDY))
        assert engine.stats.tiers["host"]["hit_tokens"] > 0
        tiers = engine.stats.tiers
        engine._receive(Outputs([], Stats(num_steps=1)))
        assert engine.stats.num_steps == 1 and engine.stats.tiers == tiers


async def test_a_core_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineDead, match="kv_disk_path: ./dev/null."):
        await make(kv_disk_path="/dev/null", kv_disk_bytes=2**24).start()


def test_an_engine_that_is_closed_before_it_is_ready_leaves_no_error_behind() -> None:
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        engine = make()
        engine.spawn()
        await engine.close()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)

    asyncio.run(run())
    gc.collect()
    assert complaints == []


def test_no_process_and_no_directory_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio, sys
        from tests.engine.test_client import make
        async def run():
            engine = make()
            await engine.start()
            print(engine._process.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(run())
        """
    )
    parent = EndlessProgram("-c", script, TMPDIR=str(tmp_path))
    core = int(parent.line(""))
    parent.end()
    assert all_gone([core])
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_takes_no_sockets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    engine = make()
    with pytest.raises(ConfigError, match="TMPDIR: no sockets can be made in .*xxx"):
        await engine.start()
    await engine.close()
    assert not list(folder.iterdir())


async def test_a_file_that_hangs_is_refused_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads hangs in the kernel, as on a mount whose server is gone."""
    (tmp_path / "adapter_config.json").write_text("{}")
    is_over = threading.Event()
    monkeypatch.setattr(adapter_files, "open_regular", lambda _path: is_over.wait() and io.BytesIO())
    with pytest.raises(AdapterError, match=r"reading adapter_config.json has made no progress for 0.1 s"):
        await adapter_files.read_ahead(str(tmp_path), stall_s=0.1)
    is_over.set()
