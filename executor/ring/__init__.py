"""A message queue in shared memory: one writer, N readers on the same machine, all messages in the same order."""

from penstock.executor.ring.queue import MessageQueue, PeerDied, RingClosed

__all__ = ["MessageQueue", "PeerDied", "RingClosed"]
