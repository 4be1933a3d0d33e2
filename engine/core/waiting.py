"""The waiting queue: by priority, then by arrival; and no request waits for ever.

Within a priority the order is that of arrival, so a preempted request, which keeps its place of arrival,
comes back before anything younger. A request that has waited longer than `patience_s` goes before every
priority: a stream of urgent requests delays the others, it cannot starve them.
"""

import heapq
from collections.abc import Iterator

from penstock.engine.core.request import Request


class WaitingQueue:
    """Removal is lazy: both orders keep an entry until it surfaces, and skip it when it is no longer waiting."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: dict[Request, None] = {}
        self._by_priority: list[tuple[int, int, Request]] = []
        self._by_arrival: list[tuple[int, Request]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting[request] = None
        heapq.heappush(self._by_priority, (request.priority, request.sequence, request))
        heapq.heappush(self._by_arrival, (request.sequence, request))

    def first(self, now_s: float) -> Request | None:
        """The request to admit next; it stays in the queue until removed."""
        if not self._waiting:
            return None
        while self._by_arrival[0][1] not in self._waiting:
            heapq.heappop(self._by_arrival)
        oldest = self._by_arrival[0][1]
        if now_s - oldest.arrival_s > self._patience_s:
            return oldest
        while self._by_priority[0][2] not in self._waiting:
            heapq.heappop(self._by_priority)
        return self._by_priority[0][2]

    def front(self, count: int) -> list[Request]:
        """The first `count` by priority and arrival, patience aside; they stay in the queue."""
        heap: list[tuple[int, int, Request]] = self._by_priority
        found: dict[Request, None] = {}  # one that came back may stand in the heap twice
        # Walks the heap from its top: whatever comes next is a child of what came before.
        edge = [(heap[0], 0)] if heap else []
        while edge and len(found) < count:
            entry, index = heapq.heappop(edge)
            if entry[2] in self._waiting:
                found[entry[2]] = None
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(edge, (heap[child], child))
        return list(found)

    def remove(self, request: Request) -> None:
        del self._waiting[request]
        if len(self._by_arrival) > 2 * len(self._waiting) + 64:
            self._compact()

    def _compact(self) -> None:
        self._by_priority = [(r.priority, r.sequence, r) for r in self._waiting]
        self._by_arrival = [(r.sequence, r) for r in self._waiting]
        heapq.heapify(self._by_priority)
        heapq.heapify(self._by_arrival)
