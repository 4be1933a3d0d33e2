"""The tiers of one rank, over a KV cache of torch: slots, stores and the right way to copy. Executors open one each."""

from dataclasses import dataclass, field

import torch

from penstock.executor.protocol import ExecutorConfig
from penstock.executor.tiers.transfers import (
    Copier,
    NumpyCopier,
    RankTransfers,
    block_of,
    host_arena,
    host_slots,
    open_rank,
    open_stores,
    tier_memory,
)


@dataclass(frozen=True, slots=True)
class RankTiers:
    """`transfers` is None without tiers; `host_slots`, `stores` and `memory` are for `ModelInfo`."""

    transfers: RankTransfers | None = None
    host_slots: int = 0
    stores: tuple[str, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        if self.transfers is not None:
            self.transfers.close()


def open_transfers(config: ExecutorConfig, kv: torch.Tensor, fingerprint: bytes, rank: int = 0) -> RankTiers:
    """`kv` [blocks, …], contiguous: whatever belongs to one block lies together."""
    block_bytes = kv[0].numel() * kv.element_size()
    slots = host_slots(config, block_bytes)
    if slots == 0:
        return RankTiers()
    block = block_of(config, block_bytes, fingerprint, rank)
    stores = open_stores(config, block)
    arena = host_arena(slots, block_bytes)
    blocks = kv.view(kv.shape[0], -1).view(torch.uint8)  # [blocks, bytes of a block]
    copier: Copier
    if kv.is_cuda:
        from penstock.executor.tiers.cuda_copies import CudaCopier

        copier = CudaCopier(blocks, arena)
    else:
        copier = NumpyCopier(blocks.numpy(), arena)
    transfers = open_rank(config, arena, block, copier, stores)
    return RankTiers(transfers, slots, tuple(stores), tier_memory(config, slots, block_bytes))
