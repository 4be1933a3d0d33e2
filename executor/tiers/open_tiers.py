"""Opens the tiers of one rank as configured: host blocks, the stores below them, and the server for peers.

Every executor calls `open_tiers` and passes a factory for its copier. This module imports no torch.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.cache.tiers.base import Store
from penstock.cache.tiers.disk.tier import DiskTier
from penstock.cache.tiers.memory import huge_array
from penstock.cache.tiers.names import DISK, peer_name
from penstock.cache.tiers.peer.address import read_address, read_secret
from penstock.cache.tiers.peer.server import PeerServer
from penstock.cache.tiers.peer.store import PeerTier
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.tiers.served import ServedBlocks
from penstock.executor.tiers.transfers import Copier, RankTransfers

ALIGNMENT = 4096  # a host block starts on a page, so that a disk can load directly into it
STAGING_BYTES = 2**30  # host memory for transfers if a disk or peer is configured without a host tier
SERVE_BYTES = 128 * 2**20  # limit of one rank's blocks being sent to peers at a time


@dataclass(frozen=True, slots=True)
class RankTiers:
    """The open tiers of a rank. `transfers` is None without tiers; the other fields are for `ModelInfo`."""

    transfers: RankTransfers | None = None
    num_host_blocks: int = 0
    stores: tuple[str, ...] = ()
    serves_peers: bool = False
    memory: dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        if self.transfers is not None:
            self.transfers.close()


class RankBlock(NamedTuple):
    """One rank's part of a block: its padded size in host memory, and the fingerprint of its meaning."""

    size: int
    fingerprint: bytes
    rank: int


def open_tiers(
    config: ExecutorConfig,
    block_bytes: int,
    fingerprint: bytes,
    make_copier: Callable[[np.ndarray], Copier],
    rank: int = 0,
    stores: Mapping[str, Store] | None = None,
) -> RankTiers:
    """Open the configured tiers. `make_copier` gets the host memory, uint8 [host blocks + 1, padded bytes]; its first
    block is never used. `stores` come before the configured ones."""
    if not (config.kv_disk_path or config.kv_host_bytes or config.kv_peers or config.kv_peer_listen):
        return RankTiers()
    ranks, stride = config.tensor_parallel_size, -(-block_bytes // ALIGNMENT) * ALIGNMENT
    num_blocks = _num_host_blocks(config, stride)
    block = RankBlock(stride, rank_fingerprint(fingerprint, config.block_size, block_bytes, ranks, rank), rank)
    memory = {"host tier": (num_blocks + 1) * stride}
    if config.kv_disk_path:
        memory["disk tier"] = config.kv_disk_bytes // ranks
    if config.kv_peer_listen:
        memory["for peers"] = SERVE_BYTES
    with _naming(f"kv_host_bytes: {config.kv_host_bytes} given; {memory['host tier']} bytes for a rank"):
        arena = huge_array(num_blocks + 1, stride)  # host blocks take memory when they are first written
    serve = partial(_serve, config, block) if config.kv_peer_listen else None
    opened = dict(stores or {})
    with contextlib.ExitStack() as undo:  # a directory stays locked, and memory pinned, until they are closed
        copier = make_copier(arena)
        undo.callback(copier.close)
        if config.kv_disk_path:
            opened[DISK] = _open_disk(config, block)
            undo.callback(opened[DISK].close)
        for peer in config.kv_peers:
            opened[peer_name(peer)] = store = _open_peer(config, block, peer)
            undo.callback(store.close)
        transfers = RankTransfers(arena, copier, opened, serve)
        undo.pop_all()
    return RankTiers(transfers, num_blocks, tuple(opened), serve is not None, memory)


def _num_host_blocks(config: ExecutorConfig, stride: int) -> int:
    """Return one rank's number of host blocks; raise ExecutorError if the configured memory is too small."""
    asked = config.kv_host_bytes or min(config.kv_disk_bytes or STAGING_BYTES, STAGING_BYTES)
    num_blocks = asked // config.tensor_parallel_size // stride
    if num_blocks < 2:
        name = "kv_disk_bytes" if config.kv_disk_path and not config.kv_host_bytes else "kv_host_bytes"
        raise ExecutorError(
            f"{name}: {asked} given; a block takes {stride} bytes on each of "
            f"{config.tensor_parallel_size} ranks, and at least two are needed"
        )
    return num_blocks


def rank_fingerprint(model: bytes, block_size: int, block_bytes: int, num_ranks: int, rank: int) -> bytes:
    """Return the hash of everything that defines the meaning of a rank's bytes. `model` covers the weights and dtypes;
    the first number is the version of block keys and block layout."""
    return hashlib.sha256(struct.pack("<5Q", 1, block_size, block_bytes, num_ranks, rank) + model).digest()


def _open_disk(config: ExecutorConfig, block: RankBlock) -> Store:
    path, capacity_bytes = config.kv_disk_path, config.kv_disk_bytes // config.tensor_parallel_size
    about = config.model, config.block_size
    with _naming(f"kv_disk_path: {path!r}"):
        try:
            return DiskTier(
                path, capacity_bytes=capacity_bytes, chunk_bytes=block.size, fingerprint=block.fingerprint, about=about
            )
        except ValueError as error:
            raise ExecutorError(f"kv_disk_bytes: {error}") from None


def _open_peer(config: ExecutorConfig, block: RankBlock, peer: str) -> Store:
    """Open the tier of a peer, whether or not it can be reached now."""
    endpoint = read_address("kv_peers", peer, config.tensor_parallel_size).of_rank(block.rank)
    with _naming(f"kv_peers: {peer!r}"):
        return PeerTier(endpoint, chunk_bytes=block.size, fingerprint=block.fingerprint, secret=_secret(config))


def _serve(config: ExecutorConfig, block: RankBlock, served: ServedBlocks) -> Any:
    """Return the started `PeerServer` that listens at `kv_peer_listen`."""
    address = read_address("kv_peer_listen", config.kv_peer_listen, config.tensor_parallel_size)
    port = address.port + block.rank
    with _naming(f"kv_peer_listen: {config.kv_peer_listen!r}, port {port} for rank {block.rank}"):
        server = PeerServer(
            address.of_rank(block.rank),
            served,
            chunk_bytes=block.size,
            fingerprint=block.fingerprint,
            secret=_secret(config),
            serve_bytes=SERVE_BYTES,
        )
    server.start()
    return server


@contextlib.contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Turn an OSError into an ExecutorError that names the option and its value."""
    try:
        yield
    except OSError as error:
        raise ExecutorError(f"{setting}: {error.strerror or error}") from None


def _secret(config: ExecutorConfig) -> str:
    try:
        return read_secret(config.kv_peer_secret_file, os.environ)
    except ValueError as error:
        raise ExecutorError(str(error)) from None
