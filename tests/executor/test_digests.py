"""Results that ranks compute together: the fingerprint of a checkpoint, which is that of one rank, and sums.

Ranks are threads.
"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models import digests as digests_module
from penstock.executor.models.digests import SAMPLE_BYTES, Digests
from penstock.executor.models.load import LoadedModel, load_model
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks.ranked import WEIGHTS_S
from penstock.executor.ranks.wire import Rendezvous
from penstock.executor.ranks.worker import join
from tests.support.checkpoints import config_of

CPU = torch.device("cpu")
TENSORS = {f"model.layers.{index}.weight": torch.randn(40, 64) for index in range(20)} | {
    "long": torch.arange(SAMPLE_BYTES),
    "short": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0),
}


def meeting_of(world: int) -> Callable[[int], RankGroup]:
    """Return what joins a rank with the others; each calls it in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    host, port = listener.getsockname()
    fd = listener.detach()  # the first rank's store closes it
    return lambda rank: join(rank, world, Rendezvous(host, port, host, fd if rank == 0 else None), CPU)


def on_ranks(world: int, run: Callable[[RankGroup], Any]) -> list[Any]:
    """Call `run` on each rank; return the results, or the exceptions."""
    if world == 1:
        return [run(RankGroup())]
    meet = meeting_of(world)

    def be(rank: int) -> Any:
        group = meet(rank)
        try:
            return run(group)
        except Exception as error:
            return error
        finally:
            group.gather_bytes(b"")  # no rank leaves while another one still receives
            group.close()

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(be, range(world)))


def fingerprint(group: RankGroup, tensors: dict[str, torch.Tensor] = TENSORS) -> bytes:
    digests = Digests(group, has_whole_experts=False)
    for name, tensor in tensors.items():
        digests.add(name, tuple(tensor.shape), tensor)
    return digests.fingerprint("a model")


def test_bytes_of_any_length_are_gathered_in_the_order_of_the_ranks() -> None:
    texts = [b"first", b"", b"x" * 1000]
    assert on_ranks(3, lambda group: group.gather_bytes(texts[group.rank])) == [texts] * 3
    assert RankGroup().gather_bytes(b"alone") == [b"alone"]


def test_links_for_another_thread_connect_all_ranks_before_a_step_can_run() -> None:
    def ranks_met(group: RankGroup) -> list[list[int]]:
        connect, links = group._connect, list[Mock]()
        assert connect is not None

        def recorded(name: str) -> Any:
            links.append(Mock(wraps=connect(name)))
            return links[-1]

        group._connect = recorded
        group.twin("experts on the move")
        (link,) = links
        return [[call.args[1] for call in calls.call_args_list] for calls in (link.send, link.recv)]

    assert on_ranks(3, ranks_met) == [[[1, 2], [1, 2]], [[0, 2], [0, 2]], [[0, 1], [0, 1]]]


def test_a_rank_that_has_its_weights_waits_for_as_long_as_another_one_may_read() -> None:
    limits_s = on_ranks(2, lambda group: group._backend.options._timeout.total_seconds())  # type: ignore[union-attr]
    assert min(limits_s) >= WEIGHTS_S


@pytest.mark.parametrize("name", ["model.layers.3.weight", "long", "short"])
@pytest.mark.parametrize("world", [1, 3])
def test_one_other_number_anywhere_makes_another_fingerprint(name: str, world: int) -> None:
    changed = {**TENSORS, name: TENSORS[name].clone()}
    changed[name].view(-1)[-1] += 1
    fingerprints = set(on_ranks(world, lambda group: fingerprint(group, changed)))
    assert len(fingerprints) == 1 and fingerprint(RankGroup()) not in fingerprints


def test_every_tensor_is_digested_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []
    digest = digests_module._digest

    def count(parts: list[memoryview]) -> bytes:
        digested.extend(part.nbytes for part in parts)
        return digest(parts)

    monkeypatch.setattr(digests_module, "_digest", count)
    large = {name: torch.zeros(SAMPLE_BYTES + 1) for name in TENSORS}
    on_ranks(4, lambda group: fingerprint(group, large))
    assert sorted(size for size in digested if size > SAMPLE_BYTES) == [4 * (SAMPLE_BYTES + 1)] * len(large)


def test_ranks_that_read_different_files_say_so() -> None:
    """Two machines may have different versions in one place, and each digests only a part."""
    other = {name: tensor + 1 for name, tensor in TENSORS.items()}
    for error in on_ranks(2, lambda group: fingerprint(group, TENSORS if group.is_first else other)):
        assert isinstance(error, ExecutorError)
        assert "rank 1 has read other content than the ranks before it" in str(error)


def test_a_rank_that_fails_tells_the_others_instead_of_letting_them_wait() -> None:
    def run(group: RankGroup) -> bytes:
        with Digests(group, has_whole_experts=False) as digests:
            if group.rank == 1:
                raise OSError("the disk of rank 1 is gone")
            return digests.fingerprint()

    errors = on_ranks(3, run)
    assert [str(error) for error in errors] == ["the disk of rank 1 is gone"] * 3
    assert [type(error) for error in errors] == [ExecutorError, OSError, ExecutorError]


@pytest.mark.parametrize(
    ("case", "world", "by_experts"), [("llama", 2, False), ("qwen3-moe", 4, True), ("mixtral", 2, True)]
)
def test_a_fingerprint_is_one_though_ranks_read_only_their_experts(case: str, world: int, by_experts: bool) -> None:
    read: list[set[str]] = [set() for _ in range(world)]

    def load(group: RankGroup) -> LoadedModel:
        config = config_of(case, group.world, enable_expert_parallel=by_experts and group.world > 1)
        checkpoint = open_checkpoint(config.model, config)
        read_one = checkpoint.read

        def reading(name: str) -> Any:
            read[group.rank].add(name)
            return read_one(name)

        checkpoint.read = reading  # type: ignore[method-assign]
        return load_model(config, CPU, group, lambda _line: None, checkpoint)

    expected = load(RankGroup()).fingerprint
    everything = set(read[0])
    read[0].clear()
    assert [loaded.fingerprint for loaded in on_ranks(world, load)] == [expected] * world
    assert set.union(*read) == everything
    experts = [{name for name in names if ".experts." in name} for names in read]
    held = sum(len(names) for names in experts)
    assert held < 1.5 * len(set.union(*experts)) if by_experts else not held


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rows_sum_does_not_depend_on_its_place(world: int) -> None:
    """Backends cut a tensor into pieces and begin each at another rank: of three and more the order then shows."""
    rows = [torch.randn(512, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world)]
    places = [(1, 0), (2, 1), (7, 0), (7, 3), (7, 6), (50, 49)]
    parts = [
        [torch.full((count, 512), 0.5).bfloat16().index_fill(0, torch.tensor(at), 0) for count, at in places]
        for _ in rows
    ]
    for own, row in zip(parts, rows, strict=True):
        for part, (_, at) in zip(own, places, strict=True):
            part[at] = row
    in_order = rows[0].float()
    for row in rows[1:]:
        in_order = in_order + row.float()
    for totals in on_ranks(world, lambda group: [group.sum(part.clone()) for part in parts[group.rank]]):
        assert len(totals) == len(places)
        for total, (_, at) in zip(totals, places, strict=True):
            assert torch.equal(total[at], in_order.bfloat16())
