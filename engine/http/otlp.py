"""Sends spans to a collector: OTLP over HTTP, in JSON, in batches, from a thread of its own.

To record a span never waits. What a collector that is slow or gone does not take stands in a bounded queue; what
comes on top is dropped and counted, and one warning says so, until the collector takes spans again.
"""

import http.client
import logging
import os
import secrets
import threading
from collections import deque
from itertools import islice

import msgspec

import penstock
from penstock.engine.http.telemetry import Collector

MAX_QUEUED = 8192  # spans; some 10 MB
MAX_BATCH = 512
SEND_S = 1.0  # how often what there is goes out, unless a batch is full before
TIMEOUT_S = 5.0  # of one exchange with the collector
PAUSE_S = 1.0  # after a failure; doubled for each that follows, up to the longest
LONGEST_PAUSE_S = 30.0
CLOSE_S = 2.0  # for what is left at the end
MAX_ANSWER_BYTES = 64 * 1024
BUSY = frozenset({429, 502, 503, 504})  # answers after which the same batch may be sent again

log = logging.getLogger("penstock.engine.traces")


class Exporter:
    def __init__(self, collector: Collector) -> None:
        self.num_sent = self.num_dropped = 0
        self._collector = collector
        self._queue: deque[bytes] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._is_failing = False
        self._connection: http.client.HTTPConnection | None = None
        self._head = _head(collector.service)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: bytes) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self.num_dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) == MAX_BATCH:
            self._wake.set()

    def close(self) -> None:
        """Sends what is left, for a moment; blocks that long."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    # The thread.

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.is_set():
            if pause_s:
                self._closing.wait(pause_s)
            else:
                self._wake.wait(SEND_S)
                self._wake.clear()
            pause_s = 0.0 if self._send_all() else min(max(PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
        self._drop_connection()

    def _send_all(self) -> bool:
        """False: the collector takes no spans, and those that wait stay."""
        while batch := list(islice(self._queue, MAX_BATCH)):
            try:
                status, answer = self._post(self._head + b",".join(batch) + b"]}]}]}")
            except (OSError, http.client.HTTPException) as error:
                self._drop_connection()
                return self._failed(f"{type(error).__name__}: {error}")
            if status in BUSY:
                return self._failed(f"it answered {status}")
            for _ in batch:
                self._queue.popleft()
            refused = len(batch) if status >= 300 else _num_refused(answer)
            self.num_sent += len(batch) - refused
            self.num_dropped += refused
            if refused:
                self._failed(f"it answered {status} and refused {refused} of {len(batch)}")
            else:
                self._is_failing = False
        return True

    def _post(self, body: bytes) -> tuple[int, bytes]:
        to = self._collector
        if self._connection is None:
            kind = http.client.HTTPSConnection if to.is_tls else http.client.HTTPConnection
            self._connection = kind(to.host, to.port, timeout=TIMEOUT_S)
        self._connection.request("POST", to.path, body, to.headers)
        answer = self._connection.getresponse()
        read = answer.read(MAX_ANSWER_BYTES)
        if not answer.isclosed():  # there is more, which is not wanted
            self._drop_connection()
        return answer.status, read

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failed(self, why: str) -> bool:
        if not self._is_failing:
            self._is_failing = True
            log.warning("spans: %s takes none or not all: %s; what it does not take is dropped", self._collector, why)
        return False


def _head(service: str) -> bytes:
    """What stands before the spans of every batch."""
    names: dict[str, dict[str, str]] = {
        "service.name": {"stringValue": service},
        "service.version": {"stringValue": penstock.__version__},
        "service.instance.id": {"stringValue": secrets.token_hex(8)},  # of several processes of one name
        "process.pid": {"intValue": str(os.getpid())},
    }
    resource = {"attributes": [{"key": key, "value": value} for key, value in names.items()]}
    scope = {"name": "penstock", "version": penstock.__version__}
    whole = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": []}]}]}
    return msgspec.json.encode(whole).removesuffix(b"]}]}]}")


def _num_refused(answer: bytes) -> int:
    """Of a batch that was taken for the rest."""
    try:
        found = msgspec.json.decode(answer)["partialSuccess"]["rejectedSpans"]
        return int(found)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return 0
