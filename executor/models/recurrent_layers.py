"""Layers that carry a state along where others attend: the gated delta rule (Qwen3-Next, Qwen3.5), the short convolution
(LFM2). What is kept of a request does not grow with it.
"""

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels import Ops
from penstock.executor.kernels.linear import Narrow, multiply, take_narrow
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec
from penstock.executor.models.weights import Weights
from penstock.executor.protocol import ExecutorError


class DeltaNet:
    def __init__(self, spec: DecoderSpec, delta: DeltaSpec, index: int, weights: Weights, ops: Ops) -> None:
        self._recurrent, hidden, num = ops.recurrent, spec.hidden_size, delta.value_heads
        prefix = f"model.layers.{index}.linear_attn."
        self.heads = DeltaHeads(
            *_heads_of(delta, weights.group.world),
            delta.key_dim,
            delta.value_dim,
            rate=-weights.float32(f"{prefix}A_log", (num,), "rows").exp(),
            shift=weights.float32(f"{prefix}dt_bias", (num,), "rows"),
            norm=weights.norm(f"{prefix}norm.weight", delta.value_dim),
            eps=spec.norm_eps,
        )
        self._channels = 2 * self.heads.keys + self.heads.values
        # Of all ranks:
        keys, values, group = delta.key_heads * delta.key_dim, num * delta.value_dim, num // delta.key_heads
        channels, sections = 2 * keys + values, (keys, keys, values)
        if delta.is_grouped:
            each = (delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim)
            units = (delta.key_heads,)
            names: tuple[str, ...] = (f"{prefix}in_proj_qkvz",)
            self._input = weights.linear(names, (channels + values,), hidden, False, "rows", units, (each,))
            names = (f"{prefix}in_proj_ba",)
            self._gates = weights.linear(names, (2 * num,), hidden, False, "rows", units, ((group, group),))
        else:
            names = f"{prefix}in_proj_qkv", f"{prefix}in_proj_z"
            self._input = weights.linear(names, (channels, values), hidden, False, "rows", (sections, None))
            names = f"{prefix}in_proj_b", f"{prefix}in_proj_a"
            self._gates = weights.linear(names, (num, num), hidden, False, "rows")
        self._taps = _taps(weights, f"{prefix}conv1d.weight", sections, delta.taps)
        self.output = weights.linear((f"{prefix}out_proj",), (hidden,), values, split="columns")

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._input, self._gates)

    def attend(self, hidden: Tensor | Narrow, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, values]"""
        made = multiply(self._input, hidden)
        qkv = self._recurrent.convolve(made[:, : self._channels], self._taps, None, states, batch, True)
        inputs = DeltaInputs(qkv, made[:, self._channels :], multiply(self._gates, hidden))
        return self._recurrent.delta_rule(inputs, self.heads, states, batch)


class ShortConv:
    def __init__(self, spec: DecoderSpec, conv: ConvSpec, index: int, weights: Weights, ops: Ops) -> None:
        self._recurrent, width = ops.recurrent, spec.hidden_size
        prefix = f"model.layers.{index}.conv."
        names, units = (f"{prefix}in_proj",), ((width,) * 3,)
        self._input = weights.linear(names, (3 * width,), width, conv.bias, "rows", units)
        self._taps = _taps(weights, f"{prefix}conv.weight", (width,), conv.taps)
        self._bias = weights.float32(f"{prefix}conv.bias", (width,), "rows") if conv.bias else None
        self.output = weights.linear((f"{prefix}out_proj",), (width,), width, conv.bias, "columns")

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._input)

    def attend(self, hidden: Tensor | Narrow, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, channels]"""
        before, after, x = multiply(self._input, hidden).chunk(3, dim=1)
        return after * self._recurrent.convolve(before * x, self._taps, self._bias, states, batch, False)


def state_of(spec: DecoderSpec, recurrent: DeltaSpec | ConvSpec, dtype: torch.dtype, world: int) -> tuple[int, int]:
    """What one layer keeps of a request on each rank: the number of units, and the bytes of the largest."""
    heads, matrix = 0, 0
    if isinstance(recurrent, DeltaSpec):
        key_heads, heads = _heads_of(recurrent, world)
        channels = 2 * key_heads * recurrent.key_dim + heads * recurrent.value_dim
        matrix = recurrent.key_dim * recurrent.value_dim * torch.float32.itemsize
    else:
        channels = _shared_out(spec.hidden_size, world, "channels of short convolutions (hidden_size)")
    return 1 + heads, max(matrix, (recurrent.taps - 1) * channels * dtype.itemsize, 1)


def _heads_of(delta: DeltaSpec, world: int) -> tuple[int, int]:
    """A rank's key heads, and value heads, of which every key head has as many."""
    key_heads = _shared_out(delta.key_heads, world, "key heads of recurrent layers (linear_num_key_heads)")
    return key_heads, delta.value_heads // world


def _shared_out(count: int, world: int, what: str) -> int:
    if count % world:
        raise ExecutorError(f"tensor_parallel_size: {world} given; it must divide the model's {count} {what}")
    return count // world


def _taps(weights: Weights, name: str, sections: tuple[int, ...], taps: int) -> Tensor:
    """[taps, channels], as the kernels read them."""
    return weights.float32(name, (sum(sections), 1, taps), "rows", sections)[:, 0].T.contiguous()
