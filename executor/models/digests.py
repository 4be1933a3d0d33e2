"""Digests of a checkpoint's tensors, computed by all ranks together, and the fingerprint made from them.

Each tensor is digested by one rank, or, for experts with expert parallelism, by the ranks that hold it, so that no rank
reads the whole checkpoint. The fingerprint covers the name and content of every tensor, and does not depend on the
number of ranks or on how the checkpoint is split into files.
"""

import hashlib
import re
import threading
from typing import Self

import msgspec
import torch
import xxhash
from torch import Tensor

from penstock.executor.kernels.weight import Weight
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorError

Stored = Tensor | Weight
SAMPLE_BYTES = 4096
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Report(msgspec.Struct, frozen=True):
    """A report from one rank to the others about the tensors that it has read."""

    digests: dict[str, bytes] = {}
    samples: dict[str, bytes] = {}  # digests of every tensor's first bytes, to detect that ranks read different files
    error: str = ""


class Digests:
    """Collects the digests of one load. If this rank fails within the context, before the exchange, the context manager
    reports it to the other ranks, so that they do not wait for it."""

    def __init__(self, group: RankGroup, has_whole_experts: bool) -> None:
        """`has_whole_experts` means that a rank reads only the experts that it holds."""
        self._group, self._has_whole_experts = group, has_whole_experts
        self._own, self._samples = dict[str, bytes](), dict[str, bytes]()
        self._is_exchanged = False
        self._lock = threading.Lock()

    def is_own(self, name: str) -> bool:
        """Return whether this rank must digest and check the tensor if it reads it."""
        group = self._group
        if self._has_whole_experts and _EXPERT.search(name):
            return True
        return xxhash.xxh32_intdigest(name.encode()) % group.world == group.rank

    def add(self, name: str, shape: tuple[int, ...], stored: Stored) -> None:
        """Digest a tensor as it is stored. Thread-safe."""
        kind, parts = _parts(stored)
        label = f"{kind}{list(shape)}".encode()
        digest = label + _digest(parts) if self.is_own(name) else None
        sample = label + _digest([part[:SAMPLE_BYTES] for part in parts]) if self._group.world > 1 else None
        with self._lock:
            if digest is not None:
                self._own[name] = digest
            if sample is not None:
                self._samples[name] = sample

    def fingerprint(self, *others: str) -> bytes:
        """Exchange digests with the other ranks; return a digest of all tensors and of `others`.

        All ranks must call this. Raises ExecutorError if another rank failed or read different content.
        """
        digests = self._exchange(Report(self._own, self._samples))
        total = hashlib.sha256()
        for name in sorted(digests):
            total.update(f"{len(name)}:{name}".encode() + digests[name])
        for other in others:
            total.update(f"{len(other)}:{other}".encode())
        return total.digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not self._is_exchanged:
            self._send(Report(error=str(error) or type(error).__name__))

    def _exchange(self, own: Report) -> dict[str, bytes]:
        reports = self._send(own)
        if failed := next((report.error for report in reports if report.error), ""):
            raise ExecutorError(failed)
        digests, samples = dict[str, bytes](), dict[str, bytes]()
        for rank, report in enumerate(reports):
            for found, reported in ((digests, report.digests), (samples, report.samples)):
                for name, digest in reported.items():
                    if found.setdefault(name, digest) != digest:
                        raise ExecutorError(
                            f"tensor {name!r}: rank {rank} has read other content than the ranks before it; "
                            "their files differ or changed meanwhile"
                        )
        return digests

    def _send(self, report: Report) -> list[Report]:
        self._is_exchanged = True
        if self._group.world == 1:
            return [report]
        decoder = msgspec.msgpack.Decoder(Report)
        return [decoder.decode(data) for data in self._group.gather_bytes(msgspec.msgpack.encode(report))]


def _parts(stored: Stored) -> tuple[str, list[memoryview]]:
    """Return a tensor's storage format as text, and the bytes of its parts."""
    if isinstance(stored, Tensor):
        return str(stored.dtype), [_bytes(stored)]
    name, tensors = stored.format.fingerprint_parts(stored)
    return name, [_bytes(tensor) for tensor in tensors]


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.dim():
        return memoryview(b"")
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _digest(parts: list[memoryview]) -> bytes:
    content = xxhash.xxh3_128()
    for part in parts:
        content.update(part)
    return content.digest()
