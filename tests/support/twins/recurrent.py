"""The recurrent operations of `Ops` in plain torch: the reference of the kernels in C and in Triton."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: StatePages, batch: ForwardBatch, has_silu: bool
) -> Tensor:
    before = len(weight) - 1
    size = before * x.shape[1] * x.element_size()
    tails = _read(states, batch, 0, 1, size).view(x.dtype).unflatten(2, (before, x.shape[1]))[:, 0]  # [R, taps - 1, C]
    outputs, kept = [torch.empty(0, x.shape[1], dtype=x.dtype, device=x.device)], []
    for row, part in enumerate(_parts(x, batch)):
        known = torch.cat((tails[row], part))
        windows = known.float().unfold(0, before + 1, 1) if len(part) else known.new_empty(0, x.shape[1], before + 1)
        y = (windows * weight.T).sum(-1)  # of windows [count, C, taps]
        y = y if bias is None else y + bias
        outputs.append((F.silu(y) if has_silu else y).to(x.dtype))
        kept.append(known[len(known) - before :])
    if kept:
        _write(states, batch, 0, torch.stack(kept).flatten(1)[:, None])
    return torch.cat(outputs)


def delta_rule(inputs: DeltaInputs, heads: DeltaHeads, states: StatePages, batch: ForwardBatch) -> Tensor:
    num, group, shape = heads.value_heads, heads.value_heads // heads.key_heads, (heads.key_dim, heads.value_dim)
    size = heads.key_dim * heads.value_dim * 4
    before = _read(states, batch, 1, num, size).view(torch.float32).unflatten(2, shape)
    q, k, v = (part.float() for part in inputs.qkv.split((heads.keys, heads.keys, heads.values), 1))
    q, k = (part.unflatten(1, (heads.key_heads, -1)).repeat_interleave(group, 1) for part in (q, k))
    v = v.unflatten(1, (num, -1))  # [T, H, dim]
    gates = inputs.gates.float()
    step = F.softplus(gates[:, -num:] + heads.shift)
    decay, beta = (heads.rate * step).exp(), gates[:, :num].sigmoid() if heads.erases else step
    if heads.erases:
        q, k = _direction(q) * heads.key_dim**-0.5, _direction(k)
    out, after = torch.empty_like(v), []
    starts = batch.query_starts.tolist()
    for row, (first, end) in enumerate(pairwise(starts)):
        state = before[row]  # [H, key_dim, value_dim]
        for token in range(first, end):
            state = state * decay[token, :, None, None]
            known = torch.einsum("hk,hkv->hv", k[token], state) if heads.erases else 0
            change = beta[token, :, None] * (v[token] - known)
            state = state + k[token, :, :, None] * change[:, None]
            out[token] = torch.einsum("hk,hkv->hv", q[token], state)
        after.append(state)
    if after:
        _write(states, batch, 1, torch.stack(after).flatten(2))
    if heads.skip is not None:
        out += heads.skip[:, None] * v
    if heads.norm is not None:
        out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + heads.eps) * heads.norm
    y = out * F.silu(inputs.z.float().unflatten(1, (num, -1)))
    return y.flatten(1).to(inputs.z.dtype)


def _direction(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _parts(x: Tensor, batch: ForwardBatch) -> list[Tensor]:
    counts = batch.query_starts.diff().tolist()
    return list(x[: sum(counts)].split(counts))


def _read(states: StatePages, batch: ForwardBatch, first: int, count: int, size: int) -> Tensor:
    """[R, count, size] uint8: so many bytes of each row's units from `first` on."""
    assert batch.states is not None
    found = _units(states)[_places(states, batch.states.read, first, count)][..., :size].contiguous()
    return found.masked_fill_(batch.states.is_new[:, None, None], 0)


def _write(states: StatePages, batch: ForwardBatch, first: int, values: Tensor) -> None:
    """values [R, count, numbers]"""
    assert batch.states is not None
    bytes_ = values.contiguous().view(torch.uint8)
    places = _places(states, batch.states.write, first, values.shape[1])
    _units(states)[..., : bytes_.shape[2]][places] = bytes_


def _units(states: StatePages) -> Tensor:
    """[pages, units, bytes], a view"""
    used = states.base[:, : states.units_per_page * states.unit_bytes]
    units: Tensor = used.unflatten(1, (states.units_per_page, states.unit_bytes))
    return units


def _places(states: StatePages, table: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Page and place in the page of each row's units, each [R, count]."""
    numbers = torch.arange(states.first_unit + first, states.first_unit + first + count, device=table.device)
    pages = table[:, numbers // states.units_per_page].long()
    return pages, (numbers % states.units_per_page).expand_as(pages)
