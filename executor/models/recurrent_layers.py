"""Recurrent layers, which replace attention: the gated delta rule (Qwen3-Next, Qwen3.5), Mamba 2 (Granite 4,
Nemotron-H) and the short convolution (LFM2). Their state has a fixed size, whatever the length of the request.
"""

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels import Ops, Rows
from penstock.executor.kernels.cpu_layers import DeltaLayer
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs
from penstock.executor.models.spec import ConvSpec, DecoderSpec, DeltaSpec, MambaSpec
from penstock.executor.models.weights import Matrix, Units, Weights
from penstock.executor.parallel import divide

SpecOfHeads = DeltaSpec | MambaSpec


class DeltaNet:
    def __init__(self, spec: DecoderSpec, delta: DeltaSpec, index: int, weights: Weights, ops: Ops) -> None:
        self._ops, hidden, num = ops, spec.hidden_size, delta.value_heads
        prefix = f"model.layers.{index}.linear_attn."
        norm = weights.norm(f"{prefix}norm.weight", delta.value_dim)
        heads = _read_heads(prefix, delta, weights, norm, spec.norm_eps)
        self._channels = 2 * heads.keys + heads.values
        # These sizes are sums over all ranks.
        keys, values, group = delta.key_heads * delta.key_dim, num * delta.value_dim, num // delta.key_heads
        channels, sections = 2 * keys + values, (keys, keys, values)
        if delta.is_grouped:
            each = (delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim)
            joined = Matrix(f"{prefix}in_proj_qkvz", channels + values, "rows", delta.key_heads, pieces=each)
            self.input = weights.linear(hidden, joined)
            joined = Matrix(f"{prefix}in_proj_ba", 2 * num, "rows", delta.key_heads, pieces=(group, group))
            gates = weights.linear(hidden, joined)
        else:
            joined = Matrix(f"{prefix}in_proj_qkv", channels, "rows", sections)
            self.input = weights.linear(hidden, joined, Matrix(f"{prefix}in_proj_z", values, "rows"))
            gates = weights.linear(hidden, *(Matrix(f"{prefix}in_proj_{part}", num, "rows") for part in "ba"))
        self.takes_fp8, self.takes_normed = self.input.takes_fp8 and gates.takes_fp8, False
        self.layer = DeltaLayer(gates, _taps(weights, f"{prefix}conv1d.weight", channels, delta.taps, sections), heads)
        self.output = weights.linear(values, Matrix(f"{prefix}out_proj", hidden, "columns"))

    def attend(self, hidden: Rows, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, values]"""
        (gates, taps, heads), made = self.layer, self.input(hidden)
        qkv = self._ops.convolve(made[:, : self._channels], taps, None, states, batch, True)
        inputs = DeltaInputs(qkv, made[:, self._channels :], gates(hidden))
        return self._ops.delta_rule(inputs, heads, states, batch)


class Mamba:
    def __init__(self, spec: DecoderSpec, mamba: MambaSpec, index: int, weights: Weights, ops: Ops) -> None:
        self._ops, num, groups = ops, mamba.value_heads, mamba.key_heads
        prefix = f"model.layers.{index}.mamba."
        skip = weights.float32(f"{prefix}D", (num,), "rows")
        self.heads = _read_heads(prefix, mamba, weights, None, mamba.norm_eps, skip)
        keys, values = groups * mamba.key_dim, num * mamba.value_dim
        rows, units = (keys, keys, values, values, num), (groups, groups, num, num, num)
        sizes = zip(("c", "b", "x", "z", "dt"), rows, units, strict=True)
        matrices = [Matrix(f"{prefix}{part}_proj", size, "rows", of, mamba.bias) for part, size, of in sizes]
        self._input = weights.linear(spec.hidden_size, *matrices)
        self.takes_fp8, self.takes_normed = self._input.takes_fp8, self._input.takes_normed
        convs = [(f"{prefix}{part}_conv", size, of) for part, size, of in zip("cbx", rows, units, strict=False)]
        self._taps = torch.cat([_taps(weights, f"{name}.weight", size, mamba.taps, of) for name, size, of in convs], 1)
        biases = [weights.float32(f"{name}.bias", (size,), "rows", of) for name, size, of in convs if mamba.conv_bias]
        self._bias = torch.cat(biases) if biases else None
        self._norm = _GroupNorm(f"{prefix}norm.weight", mamba, weights, ops)
        output = Matrix(f"{prefix}out_proj", spec.hidden_size, "columns", has_bias=mamba.bias)
        self.output = weights.linear(values, output)

    def attend(self, hidden: Rows, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, values]"""
        heads = self.heads
        qkv, z, gates = self._input(hidden).split((self._taps.shape[1], heads.values, heads.value_heads), 1)
        qkv = self._ops.convolve(qkv, self._taps, self._bias, states, batch, True)
        return self._norm(self._ops.delta_rule(DeltaInputs(qkv, z, gates), heads, states, batch))


class _GroupNorm:
    """A norm over all heads of a group. Ranks that share a group sum the squares of their heads."""

    def __init__(self, name: str, mamba: MambaSpec, weights: Weights, ops: Ops) -> None:
        self._ops, self._group, self._eps, self._groups = ops, weights.group, mamba.norm_eps, mamba.key_heads
        values = mamba.value_heads * mamba.value_dim
        self._size = values // self._groups
        self._weight = weights.float32(name, (values,), "rows")

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize the rank's values [T, values]."""
        if self._groups >= self._group.world:
            pairs = zip(x.split(self._size, 1), self._weight.split(self._size), strict=True)
            parts = [self._ops.rms_norm(part, weight, self._eps) for part, weight in pairs]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        squares, own = x.new_zeros((self._groups, len(x)), dtype=torch.float32), self._group.share(self._groups)[0]
        squares[own] = x.float().square().sum(1)
        scale = (self._group.sum(squares)[own] / self._size + self._eps).rsqrt()
        return (x.float() * scale[:, None] * self._weight).to(x.dtype)


class ShortConv:
    def __init__(self, spec: DecoderSpec, conv: ConvSpec, index: int, weights: Weights, ops: Ops) -> None:
        self._ops, width = ops, spec.hidden_size
        prefix = f"model.layers.{index}.conv."
        self._input = weights.linear(width, Matrix(f"{prefix}in_proj", 3 * width, "rows", (width,) * 3, conv.bias))
        self.takes_fp8, self.takes_normed = self._input.takes_fp8, self._input.takes_normed
        self._taps = _taps(weights, f"{prefix}conv.weight", width, conv.taps, (width,))
        self._bias = weights.float32(f"{prefix}conv.bias", (width,), "rows") if conv.bias else None
        self.output = weights.linear(width, Matrix(f"{prefix}out_proj", width, "columns", has_bias=conv.bias))

    def attend(self, hidden: Rows, batch: ForwardBatch, states: StatePages) -> Tensor:
        """[T, hidden] -> [T, channels]"""
        before, after, x = self._input(hidden).chunk(3, dim=1)
        return after * self._ops.convolve(before * x, self._taps, self._bias, states, batch, False)


def state_of(spec: DecoderSpec, recurrent: SpecOfHeads | ConvSpec, dtype: torch.dtype, world: int) -> tuple[int, int]:
    """Return the size of one layer's state per request and rank: number of units, and bytes of the largest unit."""
    heads, matrix = 0, 0
    if not isinstance(recurrent, ConvSpec):
        key_heads, heads = _heads_of(recurrent, world)
        channels = 2 * key_heads * recurrent.key_dim + heads * recurrent.value_dim
        matrix = recurrent.key_dim * recurrent.value_dim * torch.float32.itemsize
    else:
        channels = divide(spec.hidden_size, world, "channels of short convolutions (hidden_size)")
    return 1 + heads, max(matrix, (recurrent.taps - 1) * channels * dtype.itemsize, 1)


def _read_heads(
    prefix: str, recurrent: SpecOfHeads, weights: Weights, norm: Tensor | None, eps: float, skip: Tensor | None = None
) -> DeltaHeads:
    sizes = *_heads_of(recurrent, weights.group.world), recurrent.key_dim, recurrent.value_dim
    rate, shift = (weights.float32(prefix + name, (recurrent.value_heads,), "rows") for name in ("A_log", "dt_bias"))
    return DeltaHeads(*sizes, -rate.exp(), shift, norm, eps, skip)


def _heads_of(delta: SpecOfHeads, world: int) -> tuple[int, int]:
    """Return a rank's number of key heads and of value heads; all key heads have the same number of value heads."""
    if isinstance(delta, MambaSpec):
        groups, heads = delta.key_heads, divide(delta.value_heads, world, "Mamba heads (mamba_n_heads)")
        if world % groups:  # otherwise several ranks share a group
            divide(groups, world, "groups of Mamba heads (mamba_n_groups), or be a multiple of them")
        return max(1, groups // world), heads
    key_heads = divide(delta.key_heads, world, "key heads of recurrent layers (linear_num_key_heads)")
    return key_heads, delta.value_heads // world


def _taps(weights: Weights, name: str, channels: int, taps: int, units: Units) -> Tensor:
    """Return the convolution weights [taps, channels] in the layout of the kernels."""
    return weights.float32(name, (channels, 1, taps), "rows", units)[:, 0].T.contiguous()
