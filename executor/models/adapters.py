"""The adapters that a rank holds, and what a step's rows take of them.

All lie in the host's memory. What is asked of a step: which rows, next to each other, have which adapter. On a GPU the
step's own are copied to places on the device before it runs, over those that no row of it needs.
"""

import re
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.low_rank import CpuAdapters, LowRank, LowRankPart
from penstock.executor.loading.arrangement import Arranged, Arrangement
from penstock.executor.loading.peft import PeftFolder
from penstock.executor.models.product import Product
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import AdapterError, AdapterInfo, ExecutorConfig, ExecutorError

if TYPE_CHECKING:
    from penstock.executor.kernels.places import AdapterPlaces, Shape


_NUMBER = "(0|[1-9][0-9]{0,5})"  # written in one way only: the names of other ranks' experts are not looked up
_OF_EXPERT = re.compile(rf"model\.layers\.{_NUMBER}\.\w+\.experts\.{_NUMBER}\.\w+")
_OF_STACK = re.compile(rf"model\.(?:language_model\.)?layers\.{_NUMBER}\.\w+\.experts\.(\w+)")


class Runs(Protocol):
    def add(self, product: int, x: Tensor, y: Tensor) -> None: ...

    def of_experts(self, num_slots: int, tokens: Tensor, slots: Tensor) -> "Runs": ...


class Adapted:
    """`ForwardBatch.adapters`: what a step's adapters add to products."""

    def __init__(self, numbers: dict[Linear, int], runs: Runs, wanted: "Runs | None", changes_experts: bool) -> None:
        self._numbers, self.runs, self._wanted, self.changes_experts = numbers, runs, wanted, changes_experts

    def add(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """To y [T, out], what `linear` made of x [T, in]."""
        if (number := self._numbers.get(linear)) is not None:
            self.runs.add(number, x, y)

    @property
    def wanted(self) -> "Adapted":
        """Of the tokens `ForwardBatch.wanted` alone."""
        return self if self._wanted is None else Adapted(self._numbers, self._wanted, None, self.changes_experts)

    def of_experts(self, num_slots: int, tokens: Tensor, slots: Tensor) -> "Adapted":
        return Adapted(self._numbers, self.runs.of_experts(num_slots, tokens, slots), None, True)


class Held(NamedTuple):
    info: AdapterInfo
    number: int
    changes_experts: bool


class Factors(NamedTuple):
    """What a file has for one of our matrices, and where."""

    origin: str
    outputs: int
    inputs: int
    read: Callable[[], tuple[Tensor, Tensor]]  # B [outputs, rank], scaled, and A [rank, inputs]


class AdapterStore:
    def __init__(
        self,
        config: ExecutorConfig,
        products: list[dict[Linear, Product]],
        arrangement: Arrangement,
        group: RankGroup,
        dtype: torch.dtype,
        device: torch.device,
        num_experts: int,
    ) -> None:
        """`products`: of the layers that adapters may change, which are numbered in this order; those alike of a layer's
        experts together."""
        self._config, self._arrangement, self._group, self._num_experts = config, arrangement, group, num_experts
        self._numbers = _numbered(products)
        self._products = [product for alike in products for product in alike.values()]
        names = (name for product in self._products for name in product.names)
        self._of_experts = {_unnumbered(name) for name in names if _OF_EXPERT.fullmatch(name)}
        self._held: dict[str, Held] = {}
        self._shapes = [(*next(iter(alike.values())).shape(group), len(alike)) for alike in products]
        self._weights: CpuAdapters | AdapterPlaces = CpuAdapters(dtype)
        if device.type != "cpu":
            self._weights = _open_places(config, self._shapes, dtype, device)

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return self._weights.num_bytes

    def over(self, products: Iterable[Iterable[Linear]]) -> "AdapterStore":
        """The same adapters, in the same places, over other weights of the same model; without any, while there are none."""
        other = copy(self)
        other._numbers = _numbered(products)
        return other

    def load(self, path: str) -> AdapterInfo:
        """AdapterError says why it cannot be used; then nothing has changed."""
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
        if len(self._held) >= self._config.max_cpu_loras:
            raise AdapterError(f"max_cpu_loras: {len(self._held)} adapters are held already; unload one")
        changes_experts = any(
            parts and _OF_EXPERT.match(product.names[0])
            for product, parts in zip(self._products, products, strict=True)
        )
        taken = {held.number for held in self._held.values()}
        number = next(n for n in range(1, len(taken) + 2) if n not in taken)
        self._weights.hold(number, products)
        self._held[key] = Held(AdapterInfo(key, folder.rank, folder.num_bytes), number, changes_experts)
        return self._held[key].info

    def unload(self, key: str) -> None:
        """After the last step that needs it was submitted. Another rank may have failed to load it, or this one."""
        if (held := self._held.pop(key, None)) is not None:
            self._weights.forget(held.number)

    def number(self, key: str | None) -> int:
        """0: none"""
        return 0 if key is None else self._held[key].number

    def of_step(self, numbers: np.ndarray, starts: np.ndarray, wanted: np.ndarray) -> Adapted:
        """numbers [R] of the rows' adapters, starts [R + 1] of their tokens, wanted [W] tokens in ascending order."""
        of_tokens = np.repeat(numbers, np.diff(starts))
        runs = self._weights.runs(of_tokens)
        late = None if len(wanted) == starts[-1] else self._weights.runs(of_tokens[wanted])
        changing = {held.number for held in self._held.values() if held.changes_experts}
        return Adapted(self._numbers, runs, late, not changing.isdisjoint(numbers.tolist()))

    def _read(self, folder: PeftFolder) -> list[LowRank]:
        """Of each product what the adapter adds to it. Shapes and names are checked before anything is read."""
        found = self._single(folder) | self._stacked(folder)
        # What is of another rank's experts is checked there.
        unused = set(folder.modules) - {factors.origin for name, factors in found.items() if self._is_of_expert(name)}
        for product in self._products:
            for name, rows in zip(product.names, product.rows, strict=True):
                if (factors := found.get(name)) is None:
                    continue
                if (factors.outputs, factors.inputs) != (rows, product.columns):
                    raise ExecutorError(
                        f"{factors.origin}: the adapter is for {factors.inputs} inputs and {factors.outputs} outputs; the "
                        f"model's {name.rpartition('.')[2]} has {product.columns} and {rows}"
                    )
                unused.discard(factors.origin)
        if left := sorted(unused):
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise ExecutorError(f"{left[0]!r}{more}: no projection of this model that adapters can change here")
        return [self._cut(product, found) for product in self._products]

    def _single(self, folder: PeftFolder) -> dict[str, Factors]:
        """Of modules that the file has by themselves."""
        ups, found = Arranged(folder, self._arrangement), {}
        for stored in ups.names():
            origin = ups.origin(stored).removesuffix(".weight")
            found[stored.removesuffix(".weight")] = Factors(
                origin, ups.shape(stored)[0], folder.down_shape(origin)[1], partial(_read_single, ups, folder, stored)
            )
        return found

    def _stacked(self, folder: PeftFolder) -> dict[str, Factors]:
        """Of this rank's experts, where the file has all of a layer in one."""
        stacks = {match.groups(): stack for stack in folder.stacks if (match := _OF_STACK.fullmatch(stack))}
        is_turned = bool(self._arrangement.turned)
        found = {}
        for product in self._products:
            match = _OF_EXPERT.fullmatch(product.names[0])
            kind = "gate_up_proj" if product.names[1:] else "down_proj"
            if match is None or (stack := stacks.get((match[1], kind))) is None:
                continue
            num, outputs, inputs = folder.stack_shape(stack)
            width, depth = sum(product.rows), product.columns
            if num != self._num_experts or sorted((outputs, inputs)) != sorted((width, depth)):
                raise ExecutorError(
                    f"{stack}: the adapter is for {num} experts with {inputs} inputs and {outputs} outputs; the model's "
                    f"{self._num_experts} have {depth} and {width}"
                )
            is_crossed = outputs != width if width != depth else folder.is_crossed(is_turned)
            expert = partial(folder.expert, stack, int(match[2]), is_crossed)
            step = len(product.rows) if any(name in stack for name in self._arrangement.alternating) else 1
            first = 0
            for index, (name, rows) in enumerate(zip(product.names, product.rows, strict=True)):
                part = slice(first, first + rows) if step == 1 else slice(index, None, step)
                found[name] = Factors(stack, rows, depth, partial(_read_part, expert, part))
                first += rows
        return found

    def _is_of_expert(self, name: str) -> bool:
        """Of any rank's."""
        match = _OF_EXPERT.fullmatch(name)
        return match is not None and int(match[2]) < self._num_experts and _unnumbered(name) in self._of_experts

    def _cut(self, product: Product, found: dict[str, Factors]) -> LowRank:
        """The rank's part: its rows of B where the ranks share out outputs, its columns of A where inputs."""
        parts: list[LowRankPart] = []
        column = 0
        widths = product.shape(self._group)[1]
        for index, (name, width) in enumerate(zip(product.names, widths, strict=True)):
            if name in found:
                up, down = product.cut(index, *found[name].read(), self._group)
                if parts and torch.equal(parts[-1].down, down):  # they were one when it was trained
                    down = parts[-1].down
                parts.append(LowRankPart(up, down, column))
            column += width
        return parts


def _numbered(products: Iterable[Iterable[Linear]]) -> dict[Linear, int]:
    return {linear: number for number, linear in enumerate(chain.from_iterable(products))}


def _read_single(ups: Arranged, folder: PeftFolder, stored: str) -> tuple[Tensor, Tensor]:
    up = ups.read(stored)
    assert isinstance(up, Tensor)
    return up, folder.down(ups.origin(stored).removesuffix(".weight"))


def _read_part(expert: Callable[[], tuple[Tensor, Tensor]], rows: slice) -> tuple[Tensor, Tensor]:
    up, down = expert()
    return up[rows], down


def _unnumbered(name: str) -> str:
    return re.sub(r"\.experts\.[0-9]+\.", ".experts.#.", name)


def _open_places(
    config: ExecutorConfig, shapes: "list[Shape]", dtype: torch.dtype, device: torch.device
) -> "AdapterPlaces":
    from penstock.executor.kernels.places import AdapterPlaces

    return AdapterPlaces(shapes, config.max_loras, config.max_lora_rank, dtype, device)
