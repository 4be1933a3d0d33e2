"""The sum over ranks is added in their order, at every place of a tensor of any length."""

import socket
import threading

import pytest
import torch

from penstock.executor.ranks.wire import Rendezvous
from penstock.executor.ranks.worker import join

CPU = torch.device("cpu")


def sums(world: int, parts: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Of each of the tensors that a rank has; what every rank gets. The ranks are threads."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    host, port = listener.getsockname()
    fd = listener.detach()  # the first rank's store closes it
    found: list[list[torch.Tensor]] = [[] for _ in range(world)]

    def run(rank: int) -> None:
        group = join(rank, world, Rendezvous(host, port, host, fd if rank == 0 else None), CPU)
        found[rank] = [group.sum(part.clone()) for part in parts[rank]]
        group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


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
    for found in sums(world, parts):
        assert len(found) == len(places)
        for total, (_, at) in zip(found, places, strict=True):
            assert torch.equal(total[at], in_order.bfloat16())
