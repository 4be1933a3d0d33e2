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
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorError


class DeltaNet:
    def __init__(self, spec: DecoderSpec, delta: DeltaSpec, index: int, weights: Weights, ops: Ops) -> None:
        _check_alone(weights.group)
        self._recurrent, hidden, num = ops.recurrent, spec.hidden_size, delta.value_heads
        prefix = f"model.layers.{index}.linear_attn."
        self.heads = DeltaHeads(
            delta.key_heads,
            num,
            delta.key_dim,
            delta.value_dim,
            rate=-weights.float32(f"{prefix}A_log", (num,)).exp(),
            shift=weights.float32(f"{prefix}dt_bias", (num,)),
            norm=weights.norm(f"{prefix}norm.weight", delta.value_dim),
            eps=spec.norm_eps,
        )
        keys, values, group = self.heads.keys, self.heads.values, num // delta.key_heads
        self._channels = 2 * keys + values
        if delta.is_grouped:
            each = (delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim)
            rows = self._channels + values
            self._input = weights.linear((f"{prefix}in_proj_qkvz",), (rows,), hidden, pieces=(each,))
            self._gates = weights.linear((f"{prefix}in_proj_ba",), (2 * num,), hidden, pieces=((group, group),))
        else:
            names = f"{prefix}in_proj_qkv", f"{prefix}in_proj_z"
            self._input = weights.linear(names, (self._channels, values), hidden)
            self._gates = weights.linear((f"{prefix}in_proj_b", f"{prefix}in_proj_a"), (num, num), hidden)
        self._taps = _taps(weights, f"{prefix}conv1d.weight", self._channels, delta.taps)
        self.output = weights.linear((f"{prefix}out_proj",), (hidden,), values)

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
        _check_alone(weights.group)
        self._recurrent, width = ops.recurrent, spec.hidden_size
        prefix = f"model.layers.{index}.conv."
        self._input = weights.linear((f"{prefix}in_proj",), (3 * width,), width, conv.bias)
        self._taps = _taps(weights, f"{prefix}conv.weight", width, conv.taps)
        self._bias = weights.float32(f"{prefix}conv.bias", (width,)) if conv.bias else None
        self.output = weights.linear((f"{prefix}out_proj",), (width,), width, conv.bias)

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._input)

    def attend(self, hidden: Tensor | Narrow, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        before, after, x = multiply(self._input, hidden).chunk(3, dim=1)
        return after * self._recurrent.convolve(before * x, self._taps, self._bias, states, batch, False)


def state_of(spec: DecoderSpec, recurrent: DeltaSpec | ConvSpec, dtype: torch.dtype) -> tuple[int, int]:
    """What one layer keeps of a request: the number of units, and the bytes of the largest."""
    heads, channels, matrix = 0, spec.hidden_size, 0
    if isinstance(recurrent, DeltaSpec):
        heads = recurrent.value_heads
        channels = 2 * recurrent.key_heads * recurrent.key_dim + heads * recurrent.value_dim
        matrix = recurrent.key_dim * recurrent.value_dim * torch.float32.itemsize
    return 1 + heads, max(matrix, (recurrent.taps - 1) * channels * dtype.itemsize, 1)


def _taps(weights: Weights, name: str, channels: int, taps: int) -> Tensor:
    """[taps, channels], as the kernels read them."""
    return weights.float32(name, (channels, 1, taps))[:, 0].T.contiguous()


def _check_alone(group: RankGroup) -> None:
    if group.world > 1:
        raise ExecutorError(
            f"tensor_parallel_size: {group.world} given; recurrent layers are not shared out between ranks, only 1 will do"
        )
