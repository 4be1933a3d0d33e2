"""One writer, N readers on the same machine, everything in the same order: a message queue in shared memory."""

from penstock.executor.ring.queue import MessageQueue, PeerDied, RingClosed

__all__ = ["MessageQueue", "PeerDied", "RingClosed"]
