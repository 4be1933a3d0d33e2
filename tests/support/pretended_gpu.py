"""A pretended GPU: torch's calls to CUDA run on the CPU, and every access to its memory is noted.

Tensors of the device are torch's with another device's name on them; each operation runs on the CPU as soon as it is
launched, so the numbers are always right. What is not done at once on a GPU is left to the clocks of
tests/support/races.py: streams, events, the host's waits, copies to and from pinned memory. Memory lies where torch's
allocators would put it (tests/support/pretended_memory.py).

Operations are seen as torch's dispatcher does, those of kernels as those of their twins; of operations that pick by
index, the rows they touch and no others. What a kernel of Triton's does by itself is not seen, and neither is a read of
pinned memory through numpy.
"""

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.pretended_memory import CPU, Block, PinnedPool, Pool
from tests.support.pretended_ops import EMPTY, PICKING, WAITING, Op, here_name, is_kernel, written_by
from tests.support.pretended_streams import Event, Graph, Stream
from tests.support.races import Races, cells, here, runs
from tests.support.twins import lora, sampling, torch_inputs, torch_ops

aten = torch.ops.aten


class Tracked(torch.Tensor):
    """A tensor in memory that is watched: the device's, or the host's where it is pinned. `inner` is plain."""

    inner: torch.Tensor  # type: ignore[assignment]
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block) -> "Tracked":
        with torch.inference_mode(False):  # some are made outside of it, and views are of the kind of what they show
            tracked = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
            )
        tracked.inner, tracked.block = inner, block
        return tracked

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where the mode is not active any more."""
        tracked = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tracked))
        return tracked.block.pool.gpu.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.block.pool.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter  # type: ignore[override]
    def data(self, other: "Tracked") -> None:
        self.inner, self.block = other.inner, other.block

    def __repr__(self) -> str:  # type: ignore[override]
        return f"on {self.device}: {self.inner}"

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode():  # where it is seen as a whole
            return super().to(*args, **kwargs)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.block.pool.gpu.fetch(self).tolist()

    def numpy(self) -> np.ndarray:  # type: ignore[override]
        assert not self.is_cuda
        watched = self.inner.numpy().view(Watched)
        watched.gpu = self.block.pool.gpu
        return watched


class Watched(np.ndarray):
    """Pinned memory as numpy sees it: writes are noted."""

    gpu: "PretendedGpu | None" = None

    def __array_finalize__(self, of: Any) -> None:
        self.gpu = getattr(of, "gpu", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = np.ndarray.__getitem__(self, key)
        if self.gpu is not None and isinstance(target, np.ndarray):
            self.gpu.touch_array(target, is_write=True)
        super().__setitem__(key, value)


class PretendedGpu(TorchDispatchMode):
    """`with` it active, torch's device "cuda" is this one. It knows one thread, which may say to be another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races = Races()
        self.streams: list[int] = []  # their actors
        self.host = self.races.actor("the host")  # the thread that is being run
        self._threads: dict[str, int] = {}  # others, which are only said to be some
        self.stream = Stream(self, "the computing stream")
        self._capture_stream: Stream | None = None
        self._num_streams = 0
        self._pinned = PinnedPool(self)
        self._graph: tuple[Graph, Pool] | None = None  # that is being captured
        self._count = torch.arange(1 << 12)
        self.graphs: list[Graph] = []
        self.copies: list[bool] = []  # to and from the host, in order: whether the host goes on at once
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> "PretendedGpu":
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._patch()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()
        torch.set_num_threads(self._num_threads)

    @contextlib.contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Do something as another thread of the host would that was woken just now, and that nothing waits for."""
        if name not in self._threads:
            self._threads[name] = self.races.actor(name)
        self.races.wait(self._threads[name], self.races.now(self.host))
        with mock.patch.object(self, "host", self._threads[name]):
            yield

    def _patch(self) -> None:
        for name, value in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "Stream": lambda *_: self.new_stream(),
            "Event": lambda enable_timing=False: Event(self, enable_timing),
            "current_stream": lambda *_: self.stream,
            "stream": self.on,
            "synchronize": lambda *_: self.synchronize(),
            "CUDAGraph": lambda: Graph(self),
            "graph_pool_handle": lambda: Pool(self, "graphs"),
            "graph": self.capture,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda *_: None,
            **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0),
            "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        }.items():
            self._patches.setattr(torch.cuda, name, value)
        # In place of the kernels, which need a real GPU, their plain-torch twins.
        self._patches.setattr("penstock.executor.models.load.select_ops", lambda *_: torch_ops)
        self._patches.setattr("penstock.executor.ranks.runner_factory.select_sampling_ops", lambda _: sampling)
        self._patches.setattr("penstock.executor.ranks.runner_factory.select_input_ops", lambda _: torch_inputs)
        self._patches.setattr("penstock.executor.ranks.rank_builder.select_input_ops", lambda _: torch_inputs)
        self._patches.setattr("penstock.executor.kernels.lora._load_kernel", lambda: lora.add_lora)
        # The twin of attention looks at a padded batch's rows on the host, which a graph of this one cannot repeat.
        self._patches.setattr("penstock.executor.ranks.runner_factory.CHUNK_BUCKETS", ())
        tensor = torch.tensor
        self._patches.setattr(torch, "tensor", lambda data, device=CPU, **kwargs: tensor(data, **kwargs).to(device))
        self._patches.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    def new_stream(self) -> Stream:
        self._num_streams += 1
        return Stream(self, f"stream {self._num_streams} of {here_name()}")

    def has_waited(self, stream: Stream, other: Stream) -> bool:
        """Return whether the next operation of `stream` comes after all that `other` has done so far."""
        return bool(self.races.now(stream.actor)[other.actor] == self.races.now(other.actor)[other.actor])

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(self, "stream", stream)

    def synchronize(self) -> None:
        for actor in self.streams:
            self.races.wait(self.host, self.races.now(actor))

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: Pool, capture_error_mode: str = "global") -> Iterator[None]:
        self.synchronize()
        self._capture_stream = self._capture_stream or Stream(self, "capturing")
        self.graphs.append(graph)
        with mock.patch.object(self, "_graph", (graph, pool)), self.on(self._capture_stream):
            yield

    def register(self, address: int, size: int, flags: int) -> int:
        if self.races.memory(address) is not None:
            return 712  # already registered
        self.races.watch("a pinned arena", address, size)
        return 0

    def unregister(self, address: int) -> int:
        self.races.forget(address)
        return 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        packet = func.overloadpacket
        flat = tree_leaves((args, kwargs))
        device = next((each for each in flat if isinstance(each, torch.device)), None)
        tracked = [each for each in flat if isinstance(each, Tracked)]
        if not tracked and (device is None or device.type == "cpu"):
            return func(*args, **kwargs)
        if packet in (aten.to, aten._to_copy) and device is not None and device.type != args[0].device.type:
            return self._bring(args[0], device, kwargs.get("non_blocking", False))
        if packet is aten.copy_ and args[0].device.type != args[1].device.type:
            self._transfer(args[0], args[1], any(each is True for each in (*args[2:], *kwargs.values())))
            return args[0]
        is_on_gpu = (device or CPU).type == "cuda" or any(each.is_cuda for each in tracked)
        if is_on_gpu and packet in WAITING:
            return func(*(self.fetch(each) if isinstance(each, Tracked) else each for each in args), **kwargs)
        return self._launch(func, args, kwargs, tracked, is_on_gpu)

    def _launch(self, func: Any, args: Any, kwargs: Any, tracked: list[Tracked], is_on_gpu: bool) -> Any:
        graph = self._graph[0] if self._graph is not None and is_on_gpu else None
        written = written_by(func, args, kwargs)
        stood_in: dict[int, Tracked] = {}

        def stand_in(value: Any) -> Any:
            plain = _plain(value)
            if isinstance(value, Tracked):
                if graph is not None and id(value) in written and value.block.graph is not graph:
                    plain = plain.clone()  # nothing of it happens before the graph is replayed
                stood_in[id(plain)] = value
            return plain

        op = Op(func, tree_map(_plain, args), tree_map(_plain, kwargs), [], [], [], here())
        positional, named = tree_map(stand_in, args), tree_map(stand_in, kwargs)
        count = itertools.count()
        plain = func(*positional, **named)
        results = tree_map(lambda result: self._wrap(next(count), result, stood_in, is_on_gpu, op), plain)
        if op.created or written or not isinstance(results, Tracked | list | tuple):  # else it is a view
            pick = PICKING.get(func.overloadpacket)
            for each in tracked:
                which = pick if each is args[0] else None
                (op.writes if id(each) in written else op.reads).append((each.inner, which))
        if graph is not None:
            graph.ops.append(op)
        elif is_on_gpu:
            self.stream.launch()
            self.note(op, self.stream.actor)
        else:
            self.note(op, self.host)
        return results

    def _wrap(self, index: int, result: Any, stood_in: dict[int, Tracked], is_on_gpu: bool, op: Op) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in stood_in:
            return stood_in[id(result)]
        storage = result.untyped_storage().data_ptr()
        for each in stood_in.values():
            if each.inner.untyped_storage().data_ptr() == storage and each.block.holds(result):
                return Tracked(result, each.block)
        if not is_on_gpu:
            return result
        if 0 in result.stride():
            result = result.contiguous()
        tracked = self._allocate(result)
        if op.func.overloadpacket not in EMPTY:
            tracked.inner.copy_(result)
            op.created.append((index, tracked.inner))
        return tracked

    def _allocate(self, like: torch.Tensor) -> Tracked:
        graph, pool = self._graph or (None, self.stream.pool)
        block = pool.allocate(like.untyped_storage().nbytes())
        block.graph = graph
        return Tracked(block.segment.view_at(block.start, like), block)

    def note(self, op: Op, actor: int) -> None:
        number = self.races.access(actor, op.origin)
        for tensor, which in op.reads:
            self._touch(number, tensor, op, which, is_write=False)
        for tensor, which in op.writes:
            self._touch(number, tensor, op, which, is_write=True)
        for _, tensor in op.created:
            self._touch(number, tensor, op, None, is_write=True)

    def _touch(self, number: int, tensor: torch.Tensor, op: Op | None, which: Any, is_write: bool) -> None:
        memory = self.races.memory(tensor.data_ptr()) if tensor.numel() else None
        if memory is None:
            return
        size = tensor.element_size()
        if which is None:
            strides = [stride * size for stride in tensor.stride()]
            touched = cells(memory, tensor.data_ptr(), tensor.shape, strides, size)
        else:
            assert op is not None
            picked = which(self._offsets(tensor), *op.args[1:]).flatten().numpy()
            touched = runs(picked * size + tensor.untyped_storage().data_ptr() - memory.base, size)
        (self.races.write if is_write else self.races.read)(number, memory, touched)

    def _offsets(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the offsets of the tensor's elements in their storage."""
        needed = tensor.untyped_storage().nbytes() // tensor.element_size()
        if len(self._count) < needed:
            self._count = torch.arange(needed)
        return self._count.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _pin(self, tensor: torch.Tensor) -> Tracked:
        pinned = self._pinned_like(tensor)
        pinned.inner.copy_(tensor)
        self._touch(self.races.access(self.host, here()), pinned.inner, None, None, is_write=True)
        return pinned

    def _pinned_like(self, tensor: torch.Tensor) -> Tracked:
        tensor = tensor.contiguous()
        block = self._pinned.allocate(tensor.untyped_storage().nbytes())
        return Tracked(block.segment.view_at(block.start, tensor), block)

    def _bring(self, source: torch.Tensor, device: torch.device, is_async: bool) -> torch.Tensor:
        """`source.to(device)`"""
        plain = _plain(source)
        target: torch.Tensor
        if device.type == "cuda":
            target = self._allocate(torch.empty_like(plain, memory_format=torch.contiguous_format))
        else:
            target = self._pinned_like(plain) if is_async else torch.empty_like(plain)
        self._transfer(target, source, is_async)
        return target

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, is_async: bool) -> None:
        assert self._graph is None, "a graph does not copy from or to the host"
        self.stream.launch()
        number = self.races.access(self.stream.actor, here())
        self._touch(number, _plain(source), None, None, is_write=False)
        self._touch(number, _plain(target), None, None, is_write=True)
        _plain(target).copy_(_plain(source))
        host = source if target.device.type == "cuda" else target
        self.copies.append(is_async and self.races.memory(_plain(host).data_ptr()) is not None)
        if not self.copies[-1]:  # not asynchronous, or not from or to pinned memory
            self.stream.synchronize()

    def fetch(self, tensor: Tracked) -> torch.Tensor:
        """Return the tensor for the host to read."""
        assert self._graph is None, "a graph cannot wait for the device"
        if tensor.is_cuda:
            self.stream.launch()
        actor = self.stream.actor if tensor.is_cuda else self.host
        self._touch(self.races.access(actor, here()), tensor.inner, None, None, is_write=False)
        if tensor.is_cuda and not is_kernel():
            self.stream.synchronize()
        return tensor.inner

    def touch_array(self, array: np.ndarray, is_write: bool) -> None:
        """Note that the host reads or writes memory that may be pinned."""
        address = array.__array_interface__["data"][0]
        memory = self.races.memory(address) if array.size else None
        if memory is not None:
            touched = cells(memory, address, array.shape, array.strides, array.itemsize)
            number = self.races.access(self.host, here())
            (self.races.write if is_write else self.races.read)(number, memory, touched)


def _plain(value: Any) -> Any:
    if isinstance(value, Tracked):
        return value.inner
    return CPU if isinstance(value, torch.device) else value
