"""The adapters that a rank holds, and what a step's rows take of them.

All lie in the host's memory. What is asked of a step: which rows, next to each other, have which adapter. On a GPU the
step's own are copied to places on the device before it runs, over those that no row of it needs.
"""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.low_rank import AdapterRun, CpuAdapter, CpuRuns, LowRank, LowRankPart
from penstock.executor.loading.arrangement import Arranged, Arrangement, arranged
from penstock.executor.loading.peft import PeftFolder
from penstock.executor.models.product import Product
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import AdapterError, AdapterInfo, ExecutorConfig, ExecutorError

if TYPE_CHECKING:
    from penstock.executor.kernels.places import AdapterPlaces


class Runs(Protocol):
    def add(self, product: int, x: Tensor, y: Tensor) -> None: ...


class Adapted:
    """`ForwardBatch.adapters`: what a step's adapters add to products."""

    def __init__(self, numbers: dict[Linear, int], runs: Runs, wanted: "Runs | None") -> None:
        self._numbers, self.runs, self._wanted = numbers, runs, wanted

    def add(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """To y [T, out], what `linear` made of x [T, in]."""
        if (number := self._numbers.get(linear)) is not None:
            self.runs.add(number, x, y)

    @property
    def wanted(self) -> "Adapted":
        """Of the tokens `ForwardBatch.wanted` alone."""
        return self if self._wanted is None else Adapted(self._numbers, self._wanted, None)


class Held(NamedTuple):
    info: AdapterInfo
    number: int
    weights: CpuAdapter | list[LowRank]

    @property
    def on_cpu(self) -> CpuAdapter:
        assert isinstance(self.weights, CpuAdapter)
        return self.weights

    @property
    def products(self) -> list[LowRank]:
        assert isinstance(self.weights, list)
        return self.weights


class AdapterStore:
    def __init__(
        self,
        config: ExecutorConfig,
        products: dict[Linear, Product],
        arrangement: Arrangement,
        group: RankGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`products`: of the layers that adapters may change, which are numbered in this order."""
        self._config, self._arrangement, self._group = config, arrangement, group
        self._dtype = dtype
        self._numbers = {linear: number for number, linear in enumerate(products)}
        self._products = [*products.values()]
        self._held: dict[str, Held] = {}
        self._by_number: dict[int, Held] = {}
        self._places: AdapterPlaces | None = None
        if device.type != "cpu":
            self._places = _open_places(config, [product.shape(group) for product in self._products], dtype, device)

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return 0 if self._places is None else self._places.num_bytes

    def load(self, path: str) -> AdapterInfo:
        """AdapterError says why it cannot be used; then nothing has changed."""
        try:
            folder = PeftFolder(Path(path), self._config.max_lora_rank)
            products = self._read(folder)
            key = folder.digest()
        except ExecutorError as error:
            raise AdapterError(str(error)) from None
        if key in self._held:
            return self._held[key].info
        if len(self._held) >= self._config.max_cpu_loras:
            raise AdapterError(f"max_cpu_loras: {len(self._held)} adapters are held already; unload one")
        weights = CpuAdapter(products) if self._places is None else products
        used = [part.down.shape[0] for parts in products for part in parts]
        number = next(n for n in range(1, len(self._held) + 2) if n not in self._by_number)
        held = Held(AdapterInfo(key, max(used), folder.num_bytes), number, weights)
        self._held[key] = self._by_number[number] = held
        return held.info

    def unload(self, key: str) -> None:
        """After the last step that needs it was submitted. Another rank may have failed to load it, or this one."""
        held = self._held.pop(key, None)
        if held is None:
            return
        del self._by_number[held.number]
        if self._places is not None:
            self._places.forget(held.number)

    def number(self, key: str | None) -> int:
        """0: none"""
        return 0 if key is None else self._held[key].number

    def of_step(self, numbers: np.ndarray, starts: np.ndarray, wanted: np.ndarray) -> Adapted:
        """numbers [R] of the rows' adapters, starts [R + 1] of their tokens, wanted [W] tokens in ascending order."""
        bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))  # where another adapter begins, and the end
        found = [
            (int(starts[first]), int(starts[end]), int(numbers[first]))
            for first, end in pairwise(bounds.tolist())
            if numbers[first]
        ]
        runs = self._runs([AdapterRun(first, end - first, number) for first, end, number in found])
        if len(wanted) == starts[-1]:
            return Adapted(self._numbers, runs, None)
        cut = [(*np.searchsorted(wanted, (first, end)).tolist(), number) for first, end, number in found]
        late = self._runs([AdapterRun(first, end - first, number) for first, end, number in cut if end > first])
        return Adapted(self._numbers, runs, late)

    def _runs(self, runs: list[AdapterRun]) -> Runs:
        if self._places is not None:
            return self._places.runs(runs, {run.adapter: self._by_number[run.adapter].products for run in runs})
        return CpuRuns(runs, [self._by_number[run.adapter].on_cpu for run in runs], self._dtype)

    def _read(self, folder: PeftFolder) -> list[LowRank]:
        """Of each product what the adapter adds to it. Shapes and names are checked before anything is read."""
        ups = arranged(folder, self._arrangement)
        there = set(ups.names())
        used: set[str] = set()
        for product in self._products:
            for name, rows in zip(product.names, product.rows, strict=True):
                if f"{name}.weight" in there:
                    origin = ups.origin(f"{name}.weight").removesuffix(".weight")
                    found = ups.shape(f"{name}.weight")[0], folder.down_shape(origin)[1]
                    if found != (rows, product.columns):
                        raise ExecutorError(
                            f"{origin}: the adapter is for {found[1]} inputs and {found[0]} outputs; the model's "
                            f"{name.rpartition('.')[2]} has {product.columns} and {rows}"
                        )
                    used.add(origin)
        if left := sorted(set(folder.modules) - used):
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise ExecutorError(f"{left[0]!r}{more}: no projection of this model that adapters can change here")
        return [self._cut(product, ups, folder, there) for product in self._products]

    def _cut(self, product: Product, ups: Arranged, folder: PeftFolder, there: set[str]) -> LowRank:
        """The rank's part: its rows of B where the ranks share out outputs, its columns of A where inputs."""
        parts, column = [], 0
        widths = product.shape(self._group)[1]
        for index, (name, width) in enumerate(zip(product.names, widths, strict=True)):
            if f"{name}.weight" in there:
                up = ups.read(f"{name}.weight")
                assert isinstance(up, Tensor)
                down = folder.down(ups.origin(f"{name}.weight").removesuffix(".weight"))
                parts.append(LowRankPart(*product.cut(index, up, down, self._group), column))
            column += width
        return parts


def _open_places(
    config: ExecutorConfig, shapes: list[tuple[int, list[int]]], dtype: torch.dtype, device: torch.device
) -> "AdapterPlaces":
    from penstock.executor.kernels.places import AdapterPlaces

    return AdapterPlaces(shapes, config.max_loras, config.max_lora_rank, dtype, device)
