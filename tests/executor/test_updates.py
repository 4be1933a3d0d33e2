"""New weights in a running executor: it is as if it had been started with them, or they are refused by name."""

import contextlib
import gc
import mmap
import os
import resource
import shutil
import signal
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.kernels.lora import LoraSlots
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorError, Sampling, WeightsError
from penstock.executor.ranks.rank_settings import RankSettings
from penstock.executor.ranks.runner_factory import RunnerFactory
from penstock.executor.ranks.wire import MessageKind
from penstock.executor.ranks.worker import Finisher
from penstock.executor.shared_tensors import SharedTensors
from penstock.executor.uniproc import UniprocExecutor
from tests.support.adapters import EVERYWHERE, Adapter, keep_in_slots
from tests.support.checkpoints import config_of, executor_of, prompts, running
from tests.support.driver import Driver
from tests.support.programs import open_files
from tests.support.refusals import cases, hardest_rows, table
from tests.support.small_models import folder
from tests.support.stored_models import stored

COUNT = 8
UP, NORM = "model.layers.{}.mlp.up_proj.weight", "model.norm.weight"
NAN = "'model.norm.weight' has numbers"
Tensors = dict[str, torch.Tensor]
Served = tuple[UniprocExecutor, list[list[int]]]


def named(case: str) -> Tensors:
    return {name: tensor for part in folder(case).glob("*.safetensors") for name, tensor in load_file(part).items()}


def changed(tensors: Tensors) -> Tensors:
    """Return tensors as far from these as another model's: the rows of every matrix in another order."""
    return {name: each if each.dim() < 2 else each.roll(1, 0).contiguous() for name, each in tensors.items()}


def saved(case: str, tensors: Tensors, path: Path) -> Path:
    shutil.copytree(folder(case), path, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, path / "model.safetensors")
    return path


def answers(executor: Any) -> list[list[int]]:
    driver = Driver(executor)
    tokens = [[token % executor.info.vocab_size for token in prompt] for prompt in prompts(2, seed=5)]
    return driver.generate(*map(driver.admit, tokens), count=COUNT, chunk=7)


UPDATED = cases(__file__, "updated models")


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(UPDATED, UPDATED[:5]))
def test_an_updated_model_is_the_one_that_a_start_would_have_loaded(case: str, dtype: str, tmp_path: Path) -> None:
    other = changed(named(case))
    path = saved(case, other, tmp_path / "other")
    fresh = executor_of(path, dtype=dtype)
    expected, executor = answers(fresh), executor_of(folder(case), dtype=dtype)
    first, before = answers(executor), executor.info.fingerprint
    executor.update_weights(str(path))
    assert executor.info == fresh.info and answers(executor) == expected
    with SharedTensors(named(case)) as shared:
        executor.update_weights(shared.path)
    assert executor.info.fingerprint == before and answers(executor) == first
    with SharedTensors(other) as shared:
        executor.update_weights(shared.path)
    assert "penstock weights" not in Path("/proc/self/maps").read_text()
    assert executor.info == fresh.info and answers(executor) == expected


@pytest.fixture(scope="module")
def served() -> Served:
    """Return an executor and its answers."""
    executor = executor_of(folder("llama"))
    return executor, answers(executor)


# A case, a tensor, an index into it (None: all of it), the new value (None removes the tensor), and the refusal.
@pytest.mark.parametrize(("case", "name", "index", "value", "message"), table(__file__, "weights", **globals()))
def test_weights_that_cannot_be_used_are_refused_by_name_and_the_old_ones_serve(
    case: str, name: str, index: Any, value: Any, message: str, served: Served, tmp_path: Path
) -> None:
    (executor, expected), tensors = served, changed(named("llama"))
    info = executor.info
    if value is None:
        del tensors[name]
    elif index is None:
        tensors[name] = value
    else:
        tensors[name][index] = value
    before = open_files()
    path = saved("llama", tensors, tmp_path / "other")
    sources = [str(path), str(path / "model.safetensors")]
    with contextlib.ExitStack() as stack:
        if case == "dtype":
            with pytest.raises(WeightsError, match=r"tensor 'model.norm.weight' is of int64; one of float32"):
                SharedTensors(tensors)
        else:
            sources.append(stack.enter_context(SharedTensors(tensors)).path)
        for source in sources:
            with pytest.raises(WeightsError, match=message):
                executor.update_weights(source)
            assert executor.info == info and answers(executor) == expected
    gc.collect()
    assert not open_files() - before


def test_an_unusable_source_is_refused(served: Served, tmp_path: Path) -> None:
    executor, expected = served
    whole = saved("llama", named("llama"), tmp_path / "whole") / "model.safetensors"
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-1])
    unsealed = [os.memfd_create("unsealed", flags) for flags in (os.MFD_ALLOW_SEALING, 0)]
    for fd in unsealed:
        os.write(fd, whole.read_bytes())
    with SharedTensors(named("llama")) as shared:
        closed = shared.path
    names = {"folder": folder, "cut": cut, "unsealed": unsealed, "closed": closed, "tmp_path": tmp_path}
    for source, message in table(__file__, "sources of weights", **names):
        with pytest.raises(WeightsError, match=message):
            executor.update_weights(source)
        assert answers(executor) == expected
    for fd in unsealed:
        os.close(fd)
    executor.update_weights(str(whole))


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm to write to")
def test_a_file_of_tensors_may_lie_on_a_tmpfs() -> None:
    executor = executor_of(folder("llama"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
        save_file(changed(named("llama")), file.name)
        executor.update_weights(file.name)
    assert answers(executor) != answers(executor_of(folder("llama")))


Bits = list[tuple[tuple[int, ...], tuple[float, ...]]]


def bits(executor: Any, keys: list[str]) -> list[Bits]:
    """Return the log-probabilities of the vocabulary for requests with each adapter and with none, side by side."""
    driver = Driver(executor)
    everything = Sampling(temperature=0.0, logprobs=-1)
    prompt = [token % executor.info.vocab_size for token in prompts(1, seed=5)[0]]
    rows = [driver.admit(prompt, everything, adapter=key) for key in (*keys, None)]
    seen: list[Bits] = [[] for _ in rows]
    while len(rows[0].output) < COUNT:
        for index, logprobs in driver.advance(*rows, chunk=7).logprobs.items():
            seen[index].append((logprobs.ids, logprobs.values))
    return seen


def adapters_of(case: str, path: Path) -> list[str]:
    targets = (*EVERYWHERE, "qkv_proj", "gate_up_proj")
    return [str(Adapter(case, path / f"adapter {seed}", seed, targets, rank=2 + seed).path) for seed in range(3)]


MODELS = [("llama-wide", "bfloat16"), ("qwen3-moe", "float32"), ("phi3", "float32"), ("qwen3.5", "float32")]
IN_SLOTS = [(*model, has_slots) for model in MODELS for has_slots in (False, True)]


@pytest.mark.parametrize(("case", "dtype", "has_slots"), hardest_rows(IN_SLOTS, [IN_SLOTS[0], IN_SLOTS[3]]))
def test_adapters_stay_over_other_weights_as_a_start_would_have_them(
    case: str, dtype: str, has_slots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_slots:
        keep_in_slots(monkeypatch)
    other, paths = changed(named(case)), adapters_of(case, tmp_path)
    path = saved(case, other, tmp_path / "other")
    options: dict[str, Any] = {"dtype": dtype, "enable_lora": True, "max_loras": 2}
    executor, fresh = (executor_of(model, **options) for model in (folder(case), path))
    *keys, third = [fresh.load_adapter(adapter).key for adapter in paths]
    assert keys == [executor.load_adapter(adapter).key for adapter in paths[:2]]
    first, held = bits(executor, keys), executor._rank.adapters._weights
    assert isinstance(held, LoraSlots) == has_slots
    expected = bits(fresh, keys)
    assert all(ours != theirs for ours, theirs in zip(first, expected, strict=True))
    executor.update_weights(str(path))
    assert executor.info == fresh.info and bits(executor, keys) == expected
    assert executor._rank.adapters._weights is held
    old = weakref.ref(executor._rank.loaded.model.adapted[0])
    executor.sleep(2)
    gc.collect()
    assert old() is None  # nothing of the adapters holds the weights that went
    assert executor.load_adapter(paths[2]).key == third
    executor.unload_adapter(keys[0])
    with SharedTensors(other) as shared:
        executor.update_weights(shared.path)
    executor.wake(["weights", "kv_cache"])
    assert bits(executor, [keys[1], third]) == bits(fresh, [keys[1], third])
    with SharedTensors(other | {NORM: other[NORM] * torch.nan}) as shared, pytest.raises(WeightsError, match=NAN):
        executor.update_weights(shared.path)
    assert bits(executor, [keys[1]]) == bits(fresh, [keys[1]])
    executor.update_weights(str(folder(case)))
    assert executor.load_adapter(paths[0]).key == keys[0] and bits(executor, keys) == first


def test_a_model_of_codes_takes_numbers_and_goes_back() -> None:
    """Codes are joined, cut and repacked in their own way; each version has the layers that it would have from a start."""
    file, _ = stored("gguf/mixed")
    executor = executor_of(file, dtype="auto")
    first, info = answers(executor), executor.info
    checkpoint, cpu = GgufCheckpoint(file), torch.device("cpu")
    parts = {name: checkpoint.read(name) for name in checkpoint.names()}
    numbers: Tensors = {
        name: part if isinstance(part, torch.Tensor) else part.dequantize(cpu, torch.float32)
        for name, part in parts.items()
    }
    with SharedTensors(numbers) as shared:
        executor.update_weights(shared.path)
    assert executor.info.fingerprint != info.fingerprint and answers(executor) == first
    with SharedTensors(changed(numbers)) as shared:
        executor.update_weights(shared.path)
    assert answers(executor) != first
    executor.update_weights(str(file))
    assert executor.info == info and answers(executor) == first


def test_names_for_the_same_memory_are_sent_once_and_nothing_is_left() -> None:
    table = torch.randn(4, 8)
    before = open_files()
    with SharedTensors({"model.embed_tokens.weight": table, "lm_head.weight": table}) as shared:
        assert list(load_file(shared.path)) == ["model.embed_tokens.weight"]
        with pytest.raises(OSError):
            Path(shared.path).write_bytes(b"other")
    assert not open_files() - before


@pytest.mark.parametrize(("case", "host"), [pytest.param("llama", 0, marks=pytest.mark.slow), ("qwen3.5", 2**20)])
def test_sleep_gives_the_memory_back_and_wake_takes_as_much(case: str, host: int) -> None:
    executor, ours = executor_of(folder(case), kv_cache_bytes=2**28, kv_host_bytes=host), os.getpid()
    first, info, awake = answers(executor), executor.info, mapped_by(ours)
    for level in (1, 2):
        executor.sleep(level)
        gc.collect()
        assert mapped_by(ours) < awake - 2**27
        assert executor._rank.loaded.has_model == (level == 1)
        if level == 2:
            with pytest.raises(WeightsError, match="level 2 has dropped the weights; update_weights"):
                executor.wake(["weights", "kv_cache"])
            executor.wake(["weights"])
            executor.update_weights(str(folder(case)))
        executor.wake(["kv_cache"])
        assert executor.info == info and answers(executor) == first and abs(mapped_by(ours) - awake) < 2**26


def mapped_by(pid: int) -> int:
    """Return the bytes of a process's address space that are in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("error", [ExecutorError("no memory for graphs"), torch.OutOfMemoryError("out of memory")])
def test_a_rank_sleeps_on_when_its_graphs_cannot_be_captured(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(folder("llama"))
    first = answers(executor)
    executor.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(RankSettings, "is_on_gpu", True)
        patch.setattr(RunnerFactory, "capture", mock.Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises(WeightsError, match=r"wake_up: .*memory"):
                executor.wake(["kv_cache"])
            assert len(executor._rank.kv) == 0
    executor.wake(["kv_cache"])
    assert answers(executor) == first


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("case", [pytest.param("llama", marks=pytest.mark.slow), "qwen3-moe"])
def test_all_ranks_take_other_weights_or_none_does(case: str, tmp_path: Path) -> None:
    other = changed(named(case))
    path = saved(case, other, tmp_path / "other")
    fresh = executor_of(path)
    with running(config_of(case, 2, enable_lora=True)) as executor:
        keys = [executor.load_adapter(adapter).key for adapter in adapters_of(case, tmp_path)]
        first, before, adapted = answers(executor), executor.info.fingerprint, bits(executor, keys)
        with SharedTensors(other | {NORM: other[NORM] * torch.nan}) as shared, pytest.raises(WeightsError, match=NAN):
            executor.update_weights(shared.path)
        assert answers(executor) == first and executor.info.fingerprint == before
        with SharedTensors(other) as shared:
            executor.update_weights(shared.path)
        assert executor.info.fingerprint == fresh.info.fingerprint and answers(executor) == answers(fresh)
        executor.sleep(1)
        executor.wake(["weights", "kv_cache"])
        assert answers(executor) == answers(fresh)
        executor.sleep(2)
        with pytest.raises(WeightsError, match="level 2 has dropped the weights"):
            executor.wake(["kv_cache"])
        executor.update_weights(str(folder(case)))
        executor.wake(["kv_cache"])
        assert answers(executor) == first and bits(executor, keys) == adapted


@pytest.mark.usefixtures("forked_ranks")
def test_no_rank_wakes_up_if_one_has_no_memory_and_all_do_when_it_has() -> None:
    with running(config_of("llama", 2, kv_cache_bytes=2**30)) as executor:
        first, pids = answers(executor), [worker.pid for worker in executor.worker_watch.workers]
        executor.sleep(1)
        asleep = [mapped_by(pid) for pid in pids]
        resource.prlimit(pids[1], resource.RLIMIT_AS, (asleep[1] + 2**28, resource.RLIM_INFINITY))
        for _ in range(2):
            with pytest.raises(
                WeightsError,
                match=r"wake_up: the limit on the address space .* does not suffice for a KV cache of 1.0 GiB",
            ):
                executor.wake(["kv_cache"])
            assert mapped_by(pids[0]) < asleep[0] + 2**28
        resource.prlimit(pids[1], resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        executor.wake(["kv_cache"])
        assert answers(executor) == first


def test_a_rank_that_is_to_sleep_finishes_its_steps_first() -> None:
    """The first rank's report ends a step for the executor; another rank may still finish it, in its own thread."""
    begun, may_end = threading.Event(), threading.Event()

    def finish(_: object) -> SimpleNamespace:
        begun.set()
        assert may_end.wait(60)
        return SimpleNamespace(transfers=None)

    rank, group = SimpleNamespace(runner=SimpleNamespace(finish=finish)), SimpleNamespace(is_first=False)
    finisher = Finisher(rank, group, None)  # type: ignore[arg-type]
    finisher.take(SimpleNamespace(step=SimpleNamespace(rows=[None])))  # type: ignore[arg-type]
    waiting = threading.Thread(target=finisher.wait)
    waiting.start()
    assert begun.wait(60) and waiting.is_alive()
    may_end.set()
    waiting.join(60)
    assert not waiting.is_alive()
    finisher.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", [MessageKind.PREPARE, MessageKind.TAKE, MessageKind.SLEEP, MessageKind.WAKE])
def test_a_rank_that_is_killed_during_an_update_ends_the_executor(kind: bytes) -> None:
    with running(config_of("llama", 2)) as executor:
        send = executor._send

        def kill(message: tuple[Any, ...], timeout_s: float) -> None:
            if message[0] == kind:
                executor.worker_watch.workers[1]._popen.kill()  # type: ignore[attr-defined]
            send(message, timeout_s)

        executor._send = kill  # type: ignore[method-assign]
        with SharedTensors(named("llama")) as shared, pytest.raises(ExecutorError, match="killed by SIGKILL"):
            executor.update_weights(shared.path)
            executor.sleep(1)
            executor.wake(["kv_cache"])


def test_a_trainer_process_that_is_killed_leaves_nothing_behind() -> None:
    executor, tensors = executor_of(folder("llama")), changed(named("llama"))
    read_end, write_end = os.pipe()
    if (trainer := os.fork()) == 0:
        with SharedTensors(tensors) as sent:
            os.write(write_end, sent.path.encode())
            signal.pause()
    try:
        shared = os.read(read_end, 1000).decode()
        assert shared.startswith(f"/proc/{trainer}/fd/")  # no name that could outlive it
        executor.update_weights(shared)
        expected, info = answers(executor), executor.info
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        for end in (read_end, write_end):
            os.close(end)
    with pytest.raises(WeightsError, match="neither a folder with weights nor a file"):
        executor.update_weights(shared)
    assert executor.info == info and answers(executor) == expected
