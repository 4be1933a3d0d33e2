"""How the ranks of one model meet: a store that the first opens, and a backend for every group of connections."""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.executor.parallel import Connections, RankGroup, naming
from penstock.executor.ranks.wire import Rendezvous

# What watches the processes sees a dead or stuck rank much earlier; this is for when nothing does.
COLLECTIVE_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 120.0


def join(rank: int, world: int, at: Rendezvous, device: torch.device, is_ordered: bool = False) -> RankGroup:
    """Meet the other ranks and return the group of all: gloo on the CPU, NCCL on CUDA."""
    if world == 1:
        return RankGroup()
    with naming("join"):
        store = TCPStore(
            at.host,
            at.port,
            world,
            is_master=rank == 0,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=at.listen_fd if rank == 0 else None,
        )

        def connect(name: str) -> Connections:
            return _backend(PrefixStore(name, store), rank, world, at.address, device)

        return RankGroup(rank, world, connect, device, is_ordered)


def _backend(store: Store, rank: int, world: int, address: str, device: torch.device) -> Connections:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        # Not run so far: the machines at hand had one GPU at most.
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return cast(Connections, dist.ProcessGroupNCCL(store, rank, world, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs have another name
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return cast(Connections, dist.ProcessGroupGloo(store, rank, world, gloo))
