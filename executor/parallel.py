"""Collectives among the ranks that compute one model together, as an object passed to the code that needs it.

In a `RankGroup` of one rank, collectives do nothing. Otherwise all ranks make the same calls in the same order. After
`sum` every rank holds the same bits; on a CPU each number is summed in rank order. `gather_columns` and `broadcast`
have the first rank as their root, the default of torch: it samples for all.

On CUDA a collective is launched on the current stream without blocking the host, so a CUDA graph may contain it
(executor/step/graphs.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import AllgatherOptions

from penstock.executor.protocol import ExecutorError

CONNECT_TIMEOUT_S = 600.0  # for ranks that still allocate host memory or open a disk's index


class CollectiveError(RuntimeError):
    """A collective failed, most often because another rank has died; then the death of that rank is the cause."""


class Connections(Protocol):
    """The part of torch's backend interface that is used here; torch's type stubs omit it."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work | None: ...
    def allgather(
        self, out: list[list[torch.Tensor]], parts: list[torch.Tensor], options: Any, /
    ) -> dist.Work | None: ...
    def gather(self, out: list[list[torch.Tensor]], parts: list[torch.Tensor], options: Any, /) -> dist.Work | None: ...
    def broadcast(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work | None: ...
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> dist.Work: ...


def share(units: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rank's range [first, end) of an even split; with fewer units than ranks, several ranks hold one."""
    first = rank * units // world
    return first, max(first + 1, (rank + 1) * units // world)


def divide(count: int, world: int, unit_name: str) -> int:
    """Return a rank's number of heads or channels; raise ExecutorError unless all ranks have equally many."""
    if count % world:
        raise ExecutorError(f"tensor_parallel_size: {world} given; it must divide the model's {count} {unit_name}")
    return count // world


class RankGroup:
    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        connect: Callable[[str], Connections] | None = None,
        device: torch.device | None = None,
        is_ordered: bool = False,
    ) -> None:
        """`connect` opens connections among the ranks; all ranks call it with the same name. With `is_ordered`, `sum`
        adds in rank order; a backend's all-reduce may split a tensor and start each piece at a different rank."""
        assert 0 <= rank < world and (connect is None) == (world == 1)
        self.rank, self.world, self.device = rank, world, device or torch.device("cpu")
        self._is_ordered = is_ordered
        self._connect = connect
        self._backend = None if connect is None else connect("first")

    def twin(self, name: str) -> "RankGroup":
        """Return a group of the same ranks with separate connections, for another thread. All ranks must call this."""
        connect = self._connect
        assert connect is not None
        twin = RankGroup(self.rank, self.world, lambda inner: connect(f"{name}/{inner}"), self.device)
        twin._meet_every_rank()
        return twin

    def _meet_every_rank(self) -> None:
        """Exchange a number with every other rank. NCCL connects two ranks at their first transfer and may wait for an
        idle device, which would be a deadlock beside graphs whose collectives wait for the other rank."""
        number = torch.zeros(1, device=self.device)
        for low, high in combinations(range(self.world), 2):
            if self.rank == low:
                self.send(number, high, CONNECT_TIMEOUT_S)
                self.receive(number, high, CONNECT_TIMEOUT_S)
            elif self.rank == high:
                self.receive(number, low, CONNECT_TIMEOUT_S)
                self.send(number, low, CONNECT_TIMEOUT_S)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, units: int) -> tuple[int, int]:
        return share(units, self.rank, self.world)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """All-reduce: return the sum over all ranks on every rank; `part` may be overwritten."""
        if self._backend is None:
            return part
        part = part.contiguous()
        if self.world == 2 or (part.is_cuda and not self._is_ordered):
            self._run("sum", self._backend.allreduce, [part], dist.AllreduceOptions())
            return part
        # A backend's summation order depends on a number's position in the tensor, and so on the rest of the batch.
        parts = [torch.empty_like(part) for _ in range(self.world)]
        self._run("sum", self._backend.allgather, [parts], [part], AllgatherOptions())
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def minimum(self, value: int) -> int:
        """Return the smallest of the ranks' values on every rank."""
        if self._backend is None:
            return value
        held = torch.tensor([value], device=self.device)
        options: Any = dist.AllreduceOptions()  # the stubs have another type for the operation
        options.reduceOp = dist.ReduceOp.MIN
        self._run("minimum", self._backend.allreduce, [held], options)
        return int(held)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank."""
        if self._backend is None:
            return [data]
        longest = -self.minimum(-len(data))
        sent = torch.tensor([*len(data).to_bytes(8, "little"), *data.ljust(longest, b"\0")], dtype=torch.uint8)
        sent = sent.to(self.device)
        received = [torch.empty_like(sent) for _ in range(self.world)]
        self._run("gather bytes", self._backend.allgather, [received], [sent], AllgatherOptions())
        texts = [each.cpu().numpy().tobytes() for each in received]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]

    def gather_columns(self, part: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """Join every rank's `share` of the columns: return [n, num_columns] on the first rank, None on the others."""
        if self._backend is None:
            return part
        shares = [share(num_columns, rank, self.world) for rank in range(self.world)]
        widest = max(end - first for first, end in shares)
        part = F.pad(part, (0, widest - part.shape[1]))  # all ranks must send equal sizes
        parts = [torch.empty_like(part) for _ in shares] if self.is_first else []
        self._run("gather", self._backend.gather, [parts] if self.is_first else [], [part], dist.GatherOptions())
        if not self.is_first:
            return None
        return torch.cat([part[:, : end - first] for part, (first, end) in zip(parts, shares, strict=True)], dim=1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` on all other ranks with the first rank's, and return it."""
        if self._backend is not None:
            self._run("broadcast", self._backend.broadcast, [tensor], dist.BroadcastOptions())
        return tensor

    def _run(self, name: str, collective: Callable[..., dist.Work | None], *arguments: Any) -> None:
        """Run a collective, whose options are its last argument. With asyncOp false, NCCL uses the current stream
        instead of one of the communicator's: stream order then suffices, and there is no work to wait for."""
        arguments[-1].asyncOp = False
        with naming(name):
            work = collective(*arguments)
            if work is not None:
                work.wait()

    def send(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        assert self._backend is not None
        with naming("send"):
            self._backend.send([tensor], rank, 0).wait(timedelta(seconds=timeout_s))

    def receive(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        """Receive a tensor from `rank` into `tensor`, which must be contiguous."""
        assert self._backend is not None
        with naming("receive"):
            self._backend.recv([tensor], rank, 0).wait(timedelta(seconds=timeout_s))

    def close(self) -> None:
        self._backend = self._connect = None


@contextmanager
def naming(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{call} over the ranks failed: {error}") from error
