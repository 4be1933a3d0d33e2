"""The heads and inputs of layers with a recurrent state (the gated delta rule or Mamba 2), and their form in C
(csrc/cpu_recurrent.h)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.batch import ForwardBatch, StatePages

MAX_TAPS = 8
MAX_HEAD = 256  # maximum size of a key or value head


class DeltaHeads(NamedTuple):
    """The sizes and float32 weights of one layer's heads. Several value heads share a key head, as in GQA."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rate: Tensor  # [value heads]: rate of the decay, negative
    shift: Tensor  # [value heads]
    norm: Tensor | None  # [value dim]; None for Mamba 2, whose norm spans several heads
    eps: float
    skip: Tensor | None = None  # [value heads]: only for Mamba 2, which does not erase

    @property
    def erases(self) -> bool:
        return self.skip is None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


class DeltaInputs(NamedTuple):
    """The inputs of T tokens: parts of merged products, so their rows are not contiguous."""

    qkv: Tensor  # [T, 2 keys + values], after the convolution
    z: Tensor  # [T, values]
    gates: Tensor  # [T, 2 value heads]: b, then a; for Mamba 2 only a


def describe_heads(heads: DeltaHeads) -> Any:
    """Return a struct penstock_delta with the fields that are the same in every step."""
    sizes = {name: getattr(heads, name) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "eps")}
    tensors = {"rate": heads.rate, "shift": heads.shift, "norm_weight": heads.norm, "skip": heads.skip}
    given = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    return _csrc.ffi.new("struct penstock_delta *", sizes | given)


def check_taps(weight: Tensor, states: StatePages, dtype: torch.dtype) -> None:
    assert weight.dtype is torch.float32 and weight.is_contiguous() and len(weight) <= MAX_TAPS
    assert (len(weight) - 1) * weight.shape[1] * dtype.itemsize <= states.unit_bytes


def check_heads(heads: DeltaHeads, states: StatePages) -> None:
    assert max(heads.key_dim, heads.value_dim) <= MAX_HEAD
    assert heads.key_dim * heads.value_dim * 4 <= states.unit_bytes


def describe_states(states: StatePages, batch: ForwardBatch) -> Any:
    """Return a struct penstock_states, whose fields are given in their order (csrc/cpu_ops.cdef.h)."""
    assert batch.states is not None
    read, write, is_new = batch.states
    assert read.dtype is write.dtype is torch.int32 and read.is_contiguous() and write.is_contiguous()
    assert is_new.dtype is torch.bool and states.base.stride(1) == 1
    tensors = states.base, (batch.chains or batch).query_starts, read, write, is_new
    sizes = states.base.stride(0), states.unit_bytes, states.first_unit, states.units_per_page, read.shape[1], len(read)
    return _csrc.ffi.new("struct penstock_states *", (*map(Tensor.data_ptr, tensors), *sizes))
