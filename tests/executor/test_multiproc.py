"""Several ranks as one executor: what they answer beside tokens (test_models.py has those), and every way to fail."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import TimeoutExpired
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.executor.process_life import ChildProcess
from penstock.executor.protocol import ExecutorError, Sampling
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.ranks.wire import Failed
from penstock.executor.ranks.worker_watch import Reports, WorkerWatch
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import config_of, exit_codes, prompts, running
from tests.support.driver import Driver, Trace
from tests.support.programs import Program, all_gone
from tests.support.refusals import table
from tests.support.small_models import folder, greedy


@pytest.mark.usefixtures("forked_ranks")
def test_sampling_and_log_probabilities_are_those_of_one_rank() -> None:
    prompt = prompts(1, seed=8)[0]
    drawn = Sampling(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2, logprobs=3, prompt_logprobs=1)

    def run(driver: Driver) -> tuple[list[int], list[tuple[int, ...]], int]:
        sequence = driver.admit(prompt, drawn)
        ids, num_prompt = [], 0
        while len(sequence.output) < 10:
            result = driver.advance(sequence, chunk=9)
            ids += [entry.ids for entry in result.logprobs.values()]
            num_prompt += sum(map(len, result.prompt_logprobs.values()))
        return sequence.output, ids, num_prompt

    expected = run(Driver(UniprocExecutor(config_of("qwen2", 1))))
    with running(config_of("qwen2", 2)) as executor:
        assert run(Driver(executor)) == expected
    assert expected[2] == len(prompt) - 1


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_over_ranks_too_a_drawn_answer_is_the_same_bits_alone_beside_others_and_after_a_preemption(ranks: int) -> None:
    """The same as over as many ranks, that is: those of one rank are sums in another order, and a draw may tip over."""
    prompt, *others = prompts(20, seed=10)
    drawn = Sampling(temperature=0.8, seed=7, logprobs=-1)

    def trace(driver: Driver, *prompts: list[int], chunk: int | None = None, preempt: bool = False) -> Trace:
        beside = [driver.admit(each, Sampling(temperature=0.8, seed=seed)) for seed, each in enumerate(prompts)]
        watched = driver.admit(prompt, drawn)
        seen = driver.trace(watched, *beside, count=5, chunk=chunk)
        if preempt:
            driver.readmit(watched)
        seen += driver.trace(watched, *beside, count=12, chunk=chunk)
        driver.free += [block for each in (*beside, watched) for block in each.blocks]
        return seen

    with running(config_of("llama-wide", ranks, max_num_seqs=64)) as executor:
        driver = Driver(executor)
        alone = trace(driver)
        assert trace(driver, *others) == alone
        assert trace(driver, *others, chunk=7) == alone
        assert trace(driver, *others[:3], preempt=True) == alone


@pytest.mark.usefixtures("forked_ranks")
def test_embeddings_are_those_of_one_rank() -> None:
    prompt = prompts(1, seed=9)[0]
    one = Driver(UniprocExecutor(config_of("qwen3", 1)))
    expected = one.advance(one.admit(prompt, pooling="last")).embeddings[0]
    with running(config_of("qwen3", 2)) as executor:
        driver = Driver(executor)
        found = driver.advance(driver.admit(prompt, pooling="last")).embeddings[0]
    np.testing.assert_allclose(np.frombuffer(found, "<f4"), np.frombuffer(expected, "<f4"), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("case", "ranks", "said"), table(__file__, "ranks", Path=Path))
def test_what_ranks_cannot_run_is_refused_by_name_and_without_a_traceback(
    case: str | Path, ranks: int, said: str
) -> None:
    with pytest.raises(ExecutorError, match=said) as caught:
        open_multiproc(config_of(case, ranks))
    assert "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_though_the_other_one_complains_too(rank: int) -> None:
    with running(config_of("llama", 2)) as executor:
        driver = Driver(executor)
        sequence = driver.admit([1, 2, 3])
        driver.advance(sequence)
        executor.worker_watch.workers[rank].kill()
        with pytest.raises(ExecutorError, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
            for _ in range(5):
                driver.advance(sequence)
        with pytest.raises(ExecutorError, match="was killed by SIGKILL"):  # and every later call says the same
            executor.check()


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_dies_while_nothing_runs_is_seen_through_the_file_descriptor() -> None:
    with running(config_of("llama", 2)) as executor:
        poll = select.poll()
        poll.register(executor.fileno(), select.POLLIN)
        executor.worker_watch.workers[1].kill()
        with pytest.raises(ExecutorError, match="rank 1 .* was killed by SIGKILL"):
            while poll.poll(60_000):  # beats come this way too
                executor.check()


def test_a_rank_that_hangs_ends_at_the_deadline_with_everybodys_whereabouts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(config_of("llama", 2)) as executor:
        driver = Driver(executor)
        sequence = driver.admit([1, 2, 3])
        driver.advance(sequence)
        # Beneath the limit of a silence, which would end it too.
        monkeypatch.setattr("penstock.executor.ranks.ranked.step_deadline_s", lambda *_: 1.0)
        os.kill(executor.worker_watch.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(
            ExecutorError, match=r"step 2 of 1 rows is not done .*: rank 0 .* was last .*; rank 1 .* was last"
        ):
            driver.advance(sequence)
    assert "worker.py" in capfd.readouterr().err  # rank 0's stacks


@pytest.mark.usefixtures("forked_ranks")
def test_a_stopped_rank_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.BEAT_LIMIT_S", 4.0)
    with running(config_of("llama", 2)) as executor:
        os.kill(executor.worker_watch.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(ExecutorError, match=r"rank 1 \(process \d+\) has sent no heartbeat for \d+ s"):
            while True:
                time.sleep(0.2)
                executor.check()


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Also when the thread that started them is not the main one, so that the kernel's own tie cannot serve."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import threading, time\n"
        "from penstock.executor.ranks.ranked import open_multiproc\n"
        "from penstock.executor.protocol import ExecutorConfig\n"
        "def work():\n"
        f"    executor = open_multiproc(ExecutorConfig(model={str(folder('llama'))!r}, tensor_parallel_size=2,\n"
        "        kv_cache_bytes=2**22))\n"
        "    print(*[worker.pid for worker in executor.worker_watch.workers], flush=True)\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=work).start()\n"
    )
    parent = Program(script)
    pids = [int(pid) for pid in parent.line("").split()]
    assert len(pids) == 2
    parent.process.kill()
    parent.end()
    assert all_gone(pids)


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_closing_ends_every_process_with_code_0_and_leaves_no_thread(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # A busy machine takes more than five seconds.
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.STOP_GRACE_S", 60.0)
    if is_forked:
        request.getfixturevalue("forked_ranks")
    folder("llama")  # making it starts a thread of tqdm
    before = {*threading.enumerate()}
    with running(config_of("llama", 2)) as executor:
        Driver(executor).advance()
    assert exit_codes(executor) == [0, 0]
    assert {*threading.enumerate()} <= before


@pytest.mark.usefixtures("forked_ranks")
def test_masks_say_what_two_ranks_may_sample() -> None:
    """Masks for no row let them go on: the requests of all masked rows have ended meanwhile."""
    prompt = prompts(1, seed=9)[0]
    expected = greedy("llama", prompt, 1)[0]
    with running(config_of("llama", 2)) as executor:
        driver = Driver(executor)
        masked, free, gone, other = (driver.admit(prompt) for _ in range(4))
        driver.advance(masked, free, masks={0: {37}})
        driver.advance(gone, other, masks={0: None})
    assert [each.output for each in (masked, free, gone, other)] == [[37], expected, expected, expected]


class OneRank:
    """A worker that has ended, and what it reported before."""

    name, pid = "rank 0 (process 1)", 1

    def __init__(self, *reports: Failed) -> None:
        self._reports = [*reports, None]

    def receive(self, timeout_s: float) -> Iterator[tuple[int, Failed | None]]:
        heard, self._reports = self._reports, []
        yield from ((0, message) for message in heard)

    def fileno(self) -> int:
        raise AssertionError("a worker that has ended is not waited for")

    def dump_stacks(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return True

    def death(self) -> str:
        return "ended with code 1"


def test_of_two_failures_of_a_rank_the_one_that_is_no_consequence_is_named() -> None:
    """Its two threads report both, in any order."""
    cause, consequence = Failed("CUDA error", "trace", False), Failed("the ranks lost each other", None, True)
    for reports in ((cause, consequence), (consequence, cause)):
        rank = OneRank(*reports)
        with pytest.raises(ExecutorError, match="CUDA error"):
            WorkerWatch([rank], cast(Reports, rank)).receive(1.0)


def test_a_rank_that_does_not_end_when_killed_holds_up_neither_the_others_nor_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.STOP_GRACE_S", 0.0)
    processes = [Mock(pid=number, wait=Mock(side_effect=TimeoutExpired("it", 0))) for number in range(2)]
    workers, reports = [ChildProcess("rank", each, Mock()) for each in processes], OneRank(Failed("why", None, False))
    with pytest.raises(ExecutorError, match="why"):
        WorkerWatch(workers, cast(Reports, reports)).receive(1.0)
    assert all(each.kill.called for each in processes)


def test_a_rank_may_be_silent_before_its_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.BEAT_LIMIT_S", -1.0)
    rank = OneRank()
    rank.receive = lambda timeout_s: iter(())  # type: ignore[method-assign]
    assert WorkerWatch([rank], cast(Reports, rank)).receive(1.0) == []
