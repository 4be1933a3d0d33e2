"""The LoRA adapters that a rank holds, and their use by the rows of a step.

All adapters are kept in host memory. For each step, adjacent rows with the same adapter form a run. On a GPU the step's
adapters are copied to places on the device before it runs, over adapters that none of its rows needs.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import AdaptedRows
from penstock.executor.kernels.lora import CpuAdapters, LoraPart, LoraProduct, LoraSlots, SlotRuns
from penstock.executor.loading.arrangement import Arranged, Arrangement
from penstock.executor.loading.peft import PeftFolder
from penstock.executor.models.weights import Product
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import AdapterError, AdapterInfo, ExecutorConfig, ExecutorError

ZEROS = "zeros"  # differs from the key of every loaded adapter, which is a digest


class LoadedAdapter(NamedTuple):
    info: AdapterInfo
    number: int


class AdapterStore:
    def __init__(
        self,
        config: ExecutorConfig,
        products: list[Product],
        arrangement: Arrangement,
        group: RankGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`products` are the layers that adapters may change, in the order of their numbers."""
        self._config, self._arrangement, self._group = config, arrangement, group
        self._products = products
        self._held: dict[str, LoadedAdapter] = {}
        self._shapes = [product.shape(group) for product in products]
        self._weights: CpuAdapters | LoraSlots = CpuAdapters(dtype)
        if device.type != "cpu":
            self._weights = LoraSlots(self._shapes, config.max_loras, config.max_lora_rank, dtype, device)

    @property
    def num_bytes(self) -> int:
        """The device memory that the adapters' places take."""
        return self._weights.num_bytes

    def load(self, path: str) -> AdapterInfo:
        """Load an adapter. Raise AdapterError if it cannot be used; then nothing has changed."""
        try:
            folder = PeftFolder(Path(path), self._config.max_lora_rank)
            products = self._read(folder)
            key = folder.digest()
        except OSError as error:
            raise AdapterError(f"{path}: {error.strerror or error}") from None
        except ExecutorError as error:
            raise AdapterError(str(error)) from None
        if key in self._held:
            return self._held[key].info
        if (num := len(self._held)) >= self._config.max_cpu_loras:
            raise AdapterError(f"max_cpu_loras: {num} adapters are held already; unload one, also before a replacement")
        taken = {held.number for held in self._held.values()}
        number = next(n for n in range(1, len(taken) + 2) if n not in taken)
        self._weights.hold(number, products)
        self._held[key] = LoadedAdapter(AdapterInfo(key, folder.rank, folder.num_bytes), number)
        return self._held[key].info

    def load_zeros(self) -> str:
        """Hold an adapter that changes nothing and return its key. The warm-up runs steps with it: on a GPU the kernels
        run for every row with an adapter, and its place is all zeros."""
        number = len(self._held) + 1  # none is unloaded before the warm-up
        self._weights.hold(number, [()] * len(self._products))
        self._held[ZEROS] = LoadedAdapter(AdapterInfo(ZEROS, 1, 0), number)
        return ZEROS

    def unload(self, key: str) -> None:
        """Unload an adapter after the last step that uses it was submitted. It may be absent if loading it failed."""
        if (held := self._held.pop(key, None)) is not None:
            self._weights.forget(held.number)

    def number(self, key: str | None) -> int:
        """Return the number of a loaded adapter; 0 if `key` is None."""
        return 0 if key is None else self._held[key].number

    def of_step(
        self, adapter_numbers: np.ndarray, starts: np.ndarray, output_indices: np.ndarray
    ) -> tuple[AdaptedRows, AdaptedRows | None]:
        """Return `adapters` and `output_adapters` of a step's batch, from the rows' adapter_numbers [R] and token
        starts [R + 1], and the ascending output_indices [W]."""
        of_tokens = np.repeat(adapter_numbers, np.diff(starts))
        runs = self._weights.runs(of_tokens)
        return runs, None if len(output_indices) == starts[-1] else self._weights.runs(of_tokens[output_indices])

    def in_graph(self, most_tiles: int) -> SlotRuns:
        """Return adapters for a graph, at first for no row. `SlotRuns.set` changes them before a replay."""
        assert isinstance(self._weights, LoraSlots)
        return self._weights.fixed_runs(most_tiles)

    def _read(self, folder: PeftFolder) -> list[LoraProduct]:
        """Read the adapter's matrices for each product. Shapes and names are checked before anything is read."""
        ups = Arranged(folder, self._arrangement)
        # Our name of each matrix → the module in the file.
        origins = {name.removesuffix(".weight"): ups.origin(name).removesuffix(".weight") for name in ups.names()}
        unused = set(folder.modules)
        for product in self._products:
            for name, rows, *_ in product.matrices:
                if (origin := origins.get(name)) is None:
                    continue
                outputs, inputs = ups.shape(f"{name}.weight")[0], folder.down_shape(origin)[1]
                if (outputs, inputs) != (rows, product.columns):
                    raise ExecutorError(
                        f"{origin}: the adapter is for {inputs} inputs and {outputs} outputs; the "
                        f"model's {name.rpartition('.')[2]} has {product.columns} and {rows}"
                    )
                unused.discard(origin)
        if left := sorted(unused):
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise ExecutorError(f"{left[0]!r}{more}: no projection of this model that adapters can change here")
        return [self._cut(product, ups, folder, origins) for product in self._products]

    def _cut(self, product: Product, ups: Arranged, folder: PeftFolder, origins: dict[str, str]) -> LoraProduct:
        """Return this rank's part: its rows of B if the product is split by outputs, its columns of A if by inputs."""
        parts: list[LoraPart] = []
        column = 0
        widths = product.shape(self._group)[1]
        for matrix, width in zip(product.matrices, widths, strict=True):
            if matrix.name in origins:
                up = ups.read(f"{matrix.name}.weight")
                assert isinstance(up, Tensor)
                up, down = product.cut(matrix, up, folder.down(origins[matrix.name]), self._group)
                if parts and torch.equal(parts[-1].down, down):  # parts of one module share A
                    down = parts[-1].down
                parts.append(LoraPart(up, down, column))
            column += width
        return parts
