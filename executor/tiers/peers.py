"""Other engines as one rank sees them: the peers it reads from, and the port at which it serves its own blocks."""

import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.tiers.base import Store, peer_name
from penstock.cache.tiers.peer.address import read_address, read_secret
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.tiers.served import Served

if TYPE_CHECKING:  # only engines with peers load what talks to them
    from penstock.cache.tiers.peer.server import PeerServer


SERVE_BYTES = 128 * 2**20  # of one rank's blocks on their way to peers at a time


class Bytes(NamedTuple):
    """What one rank's part of a block is: how long, and what gives it its meaning."""

    size: int
    fingerprint: bytes
    rank: int = 0


def open_peers(config: ExecutorConfig, block: Bytes) -> dict[str, Store]:
    """One store for each peer, by name, connected or not."""
    if not config.kv_peers:
        return {}
    from penstock.cache.tiers.peer.store import PeerTier

    secret = _secret(config)
    peers: dict[str, Store] = {}
    for peer in config.kv_peers:
        endpoint = read_address("kv_peers", peer, config.tensor_parallel_size).of_rank(block.rank)
        try:
            peers[peer_name(peer)] = PeerTier(
                endpoint, chunk_bytes=block.size, fingerprint=block.fingerprint, secret=secret
            )
        except OSError as error:
            raise ExecutorError(f"kv_peers: {peer!r}: {error.strerror}") from None
    return peers


def serve(config: ExecutorConfig, block: Bytes, served: Served) -> "PeerServer":
    """Listening at `kv_peer_listen` from here on."""
    from penstock.cache.tiers.peer.server import PeerServer

    address = read_address("kv_peer_listen", config.kv_peer_listen, config.tensor_parallel_size)
    try:
        server = PeerServer(
            address.of_rank(block.rank),
            served,
            chunk_bytes=block.size,
            fingerprint=block.fingerprint,
            secret=_secret(config),
            serve_bytes=SERVE_BYTES,
        )
    except OSError as error:
        raise ExecutorError(
            f"kv_peer_listen: {config.kv_peer_listen!r}, port {address.port + block.rank} for rank {block.rank}: "
            f"{error.strerror}"
        ) from None
    server.start()
    return server


def _secret(config: ExecutorConfig) -> str:
    try:
        return read_secret(config.kv_peer_secret_file, os.environ)
    except ValueError as error:
        raise ExecutorError(str(error)) from None
