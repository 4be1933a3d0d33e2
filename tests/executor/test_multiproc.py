"""Several ranks as one executor: their answers beside tokens (test_models.py has those), and every way to fail."""

import os
import select
import signal
import subprocess
import threading
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.executor.process_life import ChildProcess
from penstock.executor.protocol import ExecutorError, Sampling
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.ranks.wire import Failed
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import config_of, exit_codes, prompts, running
from tests.support.driver import Driver, Trace
from tests.support.refusals import table
from tests.support.small_models import folder, greedy

# Ranks are forked where a test does not say otherwise.
pytestmark = pytest.mark.usefixtures("forked_ranks")
STARTING = "penstock.executor.process_life.subprocess"


def test_samples_log_probabilities_and_embeddings_are_those_of_one_rank() -> None:
    prompt = prompts(1, seed=8)[0]
    options = Sampling(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2, logprobs=3, prompt_logprobs=1)

    def run(driver: Driver) -> tuple[list[int], list[tuple[int, ...]], int, np.ndarray]:
        sequence = driver.admit(prompt, options)
        ids, num_prompt = [], 0
        while len(sequence.output) < 10:
            result = driver.advance(sequence, chunk=9)
            ids += [entry.ids for entry in result.logprobs.values()]
            num_prompt += sum(map(len, result.prompt_logprobs.values()))
        embedding = driver.advance(driver.admit(prompt, pooling="last")).embeddings[0]
        return sequence.output, ids, num_prompt, np.frombuffer(embedding, "<f4")

    *expected, embedding = run(Driver(UniprocExecutor(config_of("qwen2", 1))))
    with running(config_of("qwen2", 2)) as executor:
        *got, got_embedding = run(Driver(executor))
    assert got == expected
    assert got[2] == len(prompt) - 1
    np.testing.assert_allclose(got_embedding, embedding, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_drawn_answer_has_the_same_bits_alone_beside_others_and_preempted(ranks: int) -> None:
    """The bits of one rank are others: its sums are in another order, and a draw may tip over."""
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


@pytest.mark.parametrize(("case", "ranks", "message"), table(__file__, "ranks", Path=Path))
def test_a_model_beyond_the_ranks_is_refused_without_a_traceback(case: str | Path, ranks: int, message: str) -> None:
    with pytest.raises(ExecutorError, match=message) as caught:
        open_multiproc(config_of(case, ranks))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_though_the_other_one_fails_too(rank: int) -> None:
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


def test_the_file_descriptor_shows_that_a_rank_died_while_nothing_runs() -> None:
    with running(config_of("llama", 2)) as executor:
        poll = select.poll()
        poll.register(executor.fileno(), select.POLLIN)
        executor.worker_watch.workers[1].kill()
        with pytest.raises(ExecutorError, match="rank 1 .* was killed by SIGKILL"):
            while poll.poll(60_000):  # beats come this way too
                executor.check()


def test_a_hung_rank_ends_at_its_deadline(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STARTING, subprocess)
    with running(config_of("llama", 2)) as executor:
        driver = Driver(executor)
        sequence = driver.admit([1, 2, 3])
        driver.advance(sequence)
        # The deadline is below the limit of a silence, which would end it too.
        monkeypatch.setattr("penstock.executor.ranks.ranked.step_deadline_s", lambda *_: 1.0)
        os.kill(executor.worker_watch.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(
            ExecutorError, match=r"step \d+ of 1 rows is not done .*: rank 0 .* was last .*; rank 1 .* was last"
        ):
            driver.advance(sequence)
    assert "worker.py" in capfd.readouterr().err  # rank 0's stacks


def test_a_stopped_rank_is_noticed_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.BEAT_LIMIT_S", 4.0)
    with running(config_of("llama", 2)) as executor:
        os.kill(executor.worker_watch.workers[1].pid, signal.SIGSTOP)
        with pytest.raises(ExecutorError, match=r"rank 1 \(process \d+\) has sent no heartbeat for \d+ s"):
            while True:
                time.sleep(0.2)
                executor.check()


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_closing_ends_every_process_with_code_0_and_leaves_no_thread(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes more than five seconds.
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.STOP_GRACE_S", 60.0)
    if not is_forked:
        monkeypatch.setattr(STARTING, subprocess)
    folder("llama")  # making it starts a thread of tqdm
    before = {*threading.enumerate()}
    with running(config_of("llama", 2)) as executor:
        Driver(executor).advance()
    assert exit_codes(executor) == [0, 0]
    assert {*threading.enumerate()} <= before


def test_two_ranks_sample_what_masks_allow() -> None:
    """Masks for no row let the ranks go on: the requests of all masked rows have ended meanwhile."""
    prompt = prompts(1, seed=9)[0]
    expected = greedy("llama", prompt, 1)[0]
    with running(config_of("llama", 2)) as executor:
        driver = Driver(executor)
        masked, free, gone, other = (driver.admit(prompt) for _ in range(4))
        driver.advance(masked, free, masks={0: {37}})
        driver.advance(gone, other, masks={0: None})
    assert [each.output for each in (masked, free, gone, other)] == [[37], expected, expected, expected]


def ended_rank(*reports: Failed) -> Any:
    """Return a worker that has ended, which is also the source of the reports that it sent before."""
    rank = Mock(pid=1, fileno=Mock(side_effect=AssertionError("a worker that has ended is not waited for")))
    rank.name = "rank 0 (process 1)"
    rank.receive.side_effect = chain([[(0, report) for report in (*reports, None)]], repeat([]))
    rank.wait.return_value, rank.death.return_value = True, "ended with code 1"
    return rank


def test_the_failure_that_is_no_consequence_of_another_is_named() -> None:
    """The two threads of a rank report both, in any order."""
    cause, consequence = Failed("CUDA error", "trace", False), Failed("the ranks lost each other", None, True)
    for reports in ((cause, consequence), (consequence, cause)):
        rank = ended_rank(*reports)
        with pytest.raises(ExecutorError, match="CUDA error"):
            WorkerWatch([rank], rank).receive(1.0)


def test_a_rank_that_does_not_end_when_killed_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.STOP_GRACE_S", 0.0)
    processes = [Mock(pid=number, wait=Mock(side_effect=subprocess.TimeoutExpired("it", 0))) for number in range(2)]
    workers, reports = (
        [ChildProcess("rank", each, Mock()) for each in processes],
        ended_rank(Failed("why", None, False)),
    )
    with pytest.raises(ExecutorError, match="why"):
        WorkerWatch(workers, reports).receive(1.0)
    assert all(each.kill.called for each in processes)


def test_a_rank_may_be_silent_before_its_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.worker_watch.BEAT_LIMIT_S", -1.0)
    rank = Mock(receive=Mock(return_value=[]))
    assert WorkerWatch([rank], rank).receive(1.0) == []
