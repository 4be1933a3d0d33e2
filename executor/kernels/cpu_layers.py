"""Runs all layers of a decoder without experts in one C call on a CPU (csrc/cpu_layers.c). In Python, each of a layer's
nine kernels costs 10 µs of overhead, as much as the kernel itself for few tokens. The results are bitwise the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.batch import ForwardBatch, KvPages, StatePages
from penstock.executor.kernels import NO_EXTRAS, NO_NORMS, Activation, HeadNorms, Ops, ScoreExtras
from penstock.executor.kernels.cpu_ops import ACTIVATIONS, CpuOps, addresses
from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.lora import CpuRuns
from penstock.executor.kernels.recurrent import DeltaHeads, check_heads, check_taps, describe_heads, describe_states


class DeltaLayer(NamedTuple):
    """The parts of a recurrent layer that replace attention."""

    gates: Linear
    taps: Tensor
    heads: DeltaHeads


class DenseLayer(NamedTuple):
    linears: tuple[Linear, Linear, Linear, Linear]  # qkv, output, gate and up, down
    num_adapted: int  # number of linears that LoRA adapters may change: all, or only the last ones
    # Norms before attention, after attention, before the MLP, after the MLP.
    norms: tuple[Tensor, Tensor | None, Tensor, Tensor | None]
    head_norms: HeadNorms = NO_NORMS
    tables: tuple[Tensor, Tensor] | None = None  # cos and sin
    extras: ScoreExtras = NO_EXTRAS  # the cap must be the same in all layers
    delta: DeltaLayer | None = None  # set for a recurrent layer, where the previous three fields are unused


class DenseSizes(NamedTuple):
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: Activation
    has_gate: bool


class CpuLayers:
    def __init__(self, ops: CpuOps, layers: Sequence[DenseLayer], sizes: DenseSizes, first: int = 0) -> None:
        """`first`: the number of the first layer among those that have pages."""
        self._first = first
        self._cpu, self._dtype = ops.cpu, ops.dtype
        self._dense_layers = layers  # keeps the tensors that C points to alive
        self._pages: KvPages | None = None  # this list is cleared when they are freed, so keep no pages beside it
        self._lib: Any = _csrc.lib
        self._layers = _csrc.ffi.new("struct penstock_layer[]", len(layers))
        self._deltas: list[Any] = []  # keeps alive the structs that the layers' structs point to
        num_adapted = 0
        for layer, plan in zip(layers, self._layers, strict=True):
            num_adapted += layer.num_adapted
            plan.product = num_adapted - len(layer.linears)
            for name, linear in zip(("qkv", "output", "gate_up", "down"), layer.linears, strict=True):
                assert linear.product is not None
                linear.product.describe(getattr(plan, name))
            plan.input_norm, plan.attention_norm, plan.mlp_norm, plan.output_norm = addresses(*layer.norms)
            if layer.delta is not None:
                self._describe_delta(plan, layer.delta)
                continue
            assert layer.tables is not None
            plan.q_norm, plan.k_norm = addresses(*layer.head_norms[:2])
            plan.cos, plan.sin, plan.sinks = addresses(*layer.tables, layer.extras.sinks)
            plan.half, plan.window = layer.tables[0].shape[1], layer.extras.window or 0
        cap = max(layer.extras.cap or 0.0 for layer in layers)
        fields = sizes._asdict() | {"activation": ACTIVATIONS.index(sizes.activation), "cap": cap}
        self._shared = _csrc.ffi.new("struct penstock_layers *", fields | {"layers": self._layers})

    def _describe_delta(self, plan: Any, delta: DeltaLayer) -> None:
        assert delta.gates.product is not None
        delta.gates.product.describe(plan.gates)
        plan.num_taps, (plan.taps,) = len(delta.taps), addresses(delta.taps)
        plan.delta = described = describe_heads(delta.heads)
        self._deltas.append(described)

    def __call__(self, residual: Tensor, batch: ForwardBatch, pages: KvPages, num: int) -> Tensor:
        """Compute the first `num` > 0 layers over the residual stream [T, hidden] in place; return the update to add."""
        if pages is not self._pages:
            self._bind(pages, batch.group_of)
        assert num > 0 and residual.is_contiguous()
        self._shared.num = num
        # The states of other layers differ only in base and first_unit.
        own = pages[self._first : self._first + len(self._layers)]
        states = next((describe_states(each, batch) for each in own if isinstance(each, StatePages)), _csrc.ffi.NULL)
        tables, groups = batch.block_tables, ((batch.kv_cells, batch.block_tables), *batch.other_groups)
        assert all(each.stride() == tables.stride() for _, each in groups)
        kv_cells, block_tables = (_csrc.ffi.new("uintptr_t[]", addresses(*each)) for each in zip(*groups, strict=True))
        update = torch.empty_like(residual)
        needed = self._lib.penstock_layers_scratch(self._cpu, self._shared, len(residual))
        scratch = torch.empty(needed, dtype=torch.uint8)
        adapted = batch.adapters
        assert adapted is None or isinstance(adapted, CpuRuns)
        runs, num_runs = (_csrc.ffi.NULL, 0) if adapted is None else (adapted.structs, len(adapted))
        tensors = batch.positions, batch.query_starts, batch.context_lens, residual, update, scratch
        sizes = len(residual), tables.stride(0), tables.shape[0], num_runs
        step = self._shared, kv_cells, block_tables, states, runs, *addresses(*tensors), *sizes
        failed = self._lib.penstock_run_layers(self._cpu, [step])
        if failed:
            raise MemoryError(f"no memory for the attention of {len(residual)} tokens")
        return update

    def _bind(self, pages: KvPages, group_of: tuple[int, ...]) -> None:
        first = next(each[0] for each in pages if not isinstance(each, StatePages))
        self._shared.page_size = first.shape[1]
        self._shared.page_stride, self._shared.slot_stride, _ = first.stride()
        for index, plan in enumerate(self._layers):
            layer_pages = pages[self._first + index]
            if isinstance(layer_pages, StatePages):
                delta = self._dense_layers[index].delta
                assert delta is not None
                check_taps(delta.taps, layer_pages, self._dtype)
                check_heads(delta.heads, layer_pages)
                plan.states, plan.first_unit = layer_pages.base.data_ptr(), layer_pages.first_unit
                continue
            assert all(each.stride() == first.stride() for each in layer_pages)
            plan.k_pages, plan.v_pages = addresses(*layer_pages)
            plan.group = group_of[self._first + index] if group_of else 0
        self._pages = pages


def join_layers(ops: Ops, layers: Sequence[DenseLayer], sizes: DenseSizes, first: int) -> CpuLayers | None:
    """Return all layers as one callable; None unless C computes all of their products."""
    linears = [linear for layer in layers for linear in (*layer.linears, *(layer.delta or ())[:1])]
    are_in_c = all(linear.product is not None for linear in linears)
    if not layers or not isinstance(ops, CpuOps) or not are_in_c:
        return None
    assert sizes.scale > 0
    return CpuLayers(ops, layers, sizes, first)
