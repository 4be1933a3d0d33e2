"""Compiles the Triton kernels that `penstock serve` needs for some models on an H100 or H200, on a machine without a GPU.

    TRITON_CACHE_DIR=kernels python deploy/compile_kernels.py qwen3-8b Qwen/Qwen3-4B …

A model is a folder with a config.json, a name in benchmarks/gpu/shapes.py, or a name on the Hugging Face hub; no weights
are read. Options of `penstock serve` that come before or after the models count for all of them. A server that finds
these files in its TRITON_CACHE_DIR compiles nothing for such a model if the versions of Penstock, torch and Triton are
the same. For other options or cards it compiles what differs.

The models start as on a GPU, on torch's device "meta", whose tensors have no content and no memory. Every launch of the
warm-up and of the graphs is noted and left out. Then each noted variant is compiled by the same call that launches it on
a GPU, so that it is stored under the same key.
"""

import argparse
import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from penstock.engine.config import ConfigError
from penstock.engine.engine_options import EngineOptions, engine_config
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import resolve_model
from penstock.engine.options import add_options, given_options
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.launch import Kernel
from penstock.executor.machine import usable_cores
from penstock.executor.models.digests import Digests
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.sampling.sampler import WORK_BYTES
from penstock.executor.uniproc import UniprocExecutor

SHAPES = Path(__file__).parents[1] / "benchmarks/gpu/shapes.py"
DEVICE = torch.device("meta")
CARD_BYTES = 80 << 30  # of an H100; an H200 has more, which only admits longer requests


class Variant(NamedTuple):
    """What is compiled: a kernel with its constants and options, for arguments of these types."""

    kernel: Kernel
    dtypes: tuple[torch.dtype, ...]  # of its tensors
    number_types: tuple[type, ...]
    options: tuple[tuple[str, Any], ...]  # constants too

    def launch(self) -> None:
        """Launch the kernel, with arguments that serve no other purpose than to select this variant."""
        tensors, numbers = (
            [torch.zeros(16, dtype=dtype) for dtype in self.dtypes],
            [kind(1) for kind in self.number_types],
        )
        self.kernel[(1,)](*tensors, *numbers, **dict(self.options))


class Launches:
    """Stands for a device's graphs and kernels, and notes each variant that is launched once."""

    def __init__(self) -> None:
        self.variants: dict[Variant, None] = {}

    def note(self, kernel: Kernel, _grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        dtypes = tuple(tensor.dtype for tensor in arguments[: kernel.num_pointers])
        number_types = tuple(type(number) for number in arguments[kernel.num_pointers :])
        self.variants.setdefault(Variant(kernel, dtypes, number_types, tuple(options.items())))

    def capture(self, call: Any) -> tuple[Any, Any]:
        """Return a graph without content, and the results of what it captures."""
        return SimpleNamespace(replay=lambda: None), call()


def note_variants(config: ExecutorConfig) -> list[Variant]:
    """Start a model as on a GPU, and return the variants of kernels that this launches."""
    launches = Launches()
    with starting_without_gpu(launches):
        UniprocExecutor(msgspec.structs.replace(config, load_format="dummy")).close()
    return list(launches.variants)


@contextmanager
def starting_without_gpu(launches: Launches) -> Iterator[None]:
    """Let executors that are opened in this context take the device "meta" for a GPU of which nothing is in use."""
    meter = SimpleNamespace(
        **dict.fromkeys(("allocated", "start_peak", "peak", "reserved"), lambda: 0),
        device=lambda: (CARD_BYTES, CARD_BYTES),
    )
    ranks, tolist = "penstock.executor.ranks", torch.Tensor.tolist
    with ExitStack() as stack:
        for patch in (
            mock.patch("penstock.executor.uniproc.choose_device", lambda *_: DEVICE),
            mock.patch("penstock.executor.kernels.select.check_card", lambda _: current_card()),
            mock.patch(f"{ranks}.rank_settings.CudaMeter", lambda _: meter),
            mock.patch(f"{ranks}.runner_factory.CudaGraphs", lambda: launches),
            mock.patch("penstock.executor.loading.dummy.PERIOD", 1),
            mock.patch("penstock.executor.loading.dummy._repeat_noise", _without_noise),
            mock.patch.object(Digests, "add", lambda *_: None),
            mock.patch.dict(WORK_BYTES, {DEVICE.type: WORK_BYTES["cuda"]}),
            mock.patch.object(Kernel, "_launch", lambda *arguments, **options: launches.note(*arguments, **options)),
            mock.patch.object(Outbox, "send", lambda _, tensors: HostCopy((), [*map(_to_host, tensors)], None)),
            mock.patch.object(torch, "equal", lambda *_: True),  # of a router's weight and its 16 bits
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device == DEVICE)),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
            mock.patch.object(torch.Tensor, "cpu", _to_host),
            mock.patch.object(torch.Tensor, "tolist", lambda tensor: tolist(_to_host(tensor))),
            mock.patch.object(torch.Tensor, "__bool__", lambda tensor: bool(tolist(_to_host(tensor)))),
        ):
            stack.enter_context(patch)
        yield


def _without_noise(period: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=period.dtype, device=DEVICE)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ones in place of what a GPU would have computed."""
    return tensor if tensor.device != DEVICE else torch.ones(tensor.shape, dtype=tensor.dtype)


class CompilingDriver:
    """Triton's driver as far as compiling needs it, for a card that is not there."""

    def __init__(self) -> None:
        major, minor = current_card().capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        self.utils = nvidia.CudaUtils()  # compiles what calls the driver

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return -1  # the number of the CPU, where the arguments are

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_only(function: JITFunction, grid: tuple[int, ...]) -> Any:
    """Replace `JITFunction.__getitem__`: compile the kernel and its launcher, and launch nothing."""

    def run(*arguments: Any, **options: Any) -> None:
        kernel = function.run(*arguments, grid=grid, warmup=True, **options)
        nvidia.CudaLauncher(kernel.src, kernel.metadata)

    return run


@contextmanager
def compiling() -> Iterator[None]:
    """Let kernels that are launched in this context, and in processes forked in it, be compiled only."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(JITFunction, "__getitem__", compile_only):
        make_driver_library(Path(folder))
        triton.knobs.compilation.store_binary_only = True  # of the compiler's stages, only the last is ever read
        triton.runtime.driver.set_active(CompilingDriver())
        yield


def compile_variants(variants: Sequence[Variant]) -> None:
    """Compile the variants of one model, in the order of their first launch, on all cores."""
    cores, context = usable_cores(), multiprocessing.get_context("fork")
    processes = [context.Process(target=_compile_part, args=(variants, first, cores)) for first in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("Some kernels could not be compiled")


def _compile_part(variants: Sequence[Variant], first: int, step: int) -> None:
    # Triton's key of a function depends on which functions had keys before it, so all get theirs as in a start.
    for variant in variants:
        assert variant.kernel._jit.cache_key
    for variant in variants[first::step]:
        variant.launch()


def make_driver_library(folder: Path) -> None:
    """Let Triton link and load its C modules with an empty library in place of the driver's: they look up its functions
    when they call them."""
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(library), f"-Wl,-soname,{library.name}"]
    subprocess.run(command, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    sys.setdlopenflags(os.RTLD_LAZY)
    ctypes.CDLL(str(library))


def read_config(model: str, options: dict[str, Any], folder: Path) -> ExecutorConfig:
    """Return the configuration that a server would have with these options; `folder` is for a configuration that has no
    folder of its own."""
    shapes = runpy.run_path(str(SHAPES))["MODELS"]
    if model in shapes:
        path = folder / model
        path.mkdir()
        (path / "config.json").write_bytes(msgspec.json.encode(shapes[model]))
    else:
        path = resolve_model(model, need_weights=False).path
    _check_storage(path)
    return engine_config(str(path), options).executor


def _check_storage(path: Path) -> None:
    """Raise ConfigError for weights stored as codes: random weights do not stand in for them."""
    stored = "gguf"
    if path.is_dir():
        quantization = msgspec.json.decode((path / "config.json").read_bytes()).get("quantization_config") or {}
        stored = quantization.get("quant_method", "fp8")
    if stored != "fp8":
        raise ConfigError(f"weights: stored as {stored}; kernels are compiled ahead for 16 bits and for fp8 in blocks")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels of models for an H100 or H200, without a GPU.")
    parser.add_argument("models", nargs="+", help="folder, name in benchmarks/gpu/shapes.py or name on the hub")
    add_options(parser, EngineOptions)
    args = parser.parse_args(arguments)
    options, started_s = given_options(args, EngineOptions), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, compiling():
        for model in args.models:
            try:
                variants = note_variants(read_config(model, options, Path(folder)))
            except (ConfigError, ExecutorError, ModelError) as error:
                sys.exit(f"{model}: {error}")
            compile_variants(variants)
            print(f"{model}: {len(variants)} kernels after {time.monotonic() - started_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
