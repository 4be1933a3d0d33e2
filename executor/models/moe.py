"""The mixture of experts: a router chooses experts for each token, and their weighted outputs are added.

Ranks split the work in one of two ways. By columns, as in any MLP: every rank has a slice of every expert. Or by
experts (`--enable-expert-parallel`): every rank has some whole experts, and computes the tokens routed to them.
Either way every rank receives all tokens, and the layer's one all-reduce sums the partial results.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.eplb import Plan
from penstock.eplb.maps import EXPERT_STEP, TOKEN_STEP, WHOLE
from penstock.executor.batch import AdaptedRows
from penstock.executor.kernels import UNGATED, Ops, Rows
from penstock.executor.kernels.eight_bits import pad_scales
from penstock.executor.kernels.linear import Linear, make_linear
from penstock.executor.kernels.stored_formats import BLOCK
from penstock.executor.kernels.weight import Weight, stack, stack_tensors
from penstock.executor.models.mlp import Mlp
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Weights
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.staging import send

U32 = 0xFFFF_FFFF


class MoeMlp:
    takes_fp8 = False  # the router needs unquantized inputs
    takes_normed = False

    def __init__(self, spec: DecoderSpec, moe: MoeSpec, index: int, weights: Weights, ops: Ops) -> None:
        prefix = f"model.layers.{index}.{moe.block}."
        self._moe = moe
        name = f"{prefix}{moe.router}"
        router = weights.float32(f"{name}.weight", (moe.num_experts, spec.hidden_size))
        bias = weights.float32(f"{name}.bias", (moe.num_experts,)) if moe.has_router_bias else None
        if moe.has_shared_gate:
            gate = weights.float32(f"{prefix}shared_expert_gate.weight", (1, spec.hidden_size))
            router = torch.cat((router, gate))
        self._router = make_router(router, bias, weights, ops)
        self._bias = None
        if moe.has_bias:
            self._bias = weights.float32(f"{prefix}gate.e_score_correction_bias", (moe.num_experts,))
        self._choose = ops.choose_experts
        shared = Mlp(spec, moe.shared_size, f"{prefix}{moe.shared_name}.", weights, ops) if moe.shared_size else None
        layer = sum(before.moe is not None for before in spec.layers[:index])
        self._into = self._out_of = None
        if size := moe.latent_size:
            self._into = weights.linear(spec.hidden_size, Matrix(f"{prefix}fc1_latent_proj", size))
            self._out_of = weights.linear(size, Matrix(f"{prefix}fc2_latent_proj", spec.hidden_size))
        inner = replace(spec, hidden_size=size or spec.hidden_size)
        self.experts = Experts(inner, moe, prefix, layer, weights, None if size else shared)
        self._shared = None if self.experts.num_shared else shared

    def adapted(self) -> list[Linear]:
        """Return the layers that LoRA adapters may change: those of the shared experts."""
        return [] if self._shared is None else self._shared.adapted()

    def __call__(self, hidden: Rows, adapters: AdaptedRows | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]: this rank's part of the sum over the ranks."""
        assert isinstance(hidden, Tensor)
        logits = self._router(hidden)
        ids, shares = self._choose(logits, self._bias, self._moe, self.experts.num_shared)
        shared = None if self._shared is None else self._shared(hidden, adapters)
        if shared is not None and self._moe.has_shared_gate:
            shared = (logits[:, self._moe.num_experts :].sigmoid() * shared).to(hidden.dtype)
        if self._into is None or self._out_of is None:
            return self.experts(hidden, ids, shares, shared)
        routed = self._out_of(self.experts(self._into(hidden), ids, shares))
        return routed if shared is None else routed + shared


def make_router(weight: Tensor, bias: Tensor | None, weights: Weights, ops: Ops) -> Callable[[Tensor], Tensor]:
    """Return the product of hidden states and the router's weight, both in float32, to float32: if rounding decided a
    near tie, the layer's output would change. Products of numbers of 16 bits are exact in float32, so a weight that the
    model's dtype represents exactly keeps it, and the hidden states are not cast."""
    narrow = weight.to(weights.dtype)
    if ops.wide_linear is not None and narrow.itemsize == 2 and torch.equal(narrow.float(), weight):
        weights.linear_maker.add_bytes("numbers", narrow.nbytes - weight.nbytes)
        return partial(ops.wide_linear, weight=narrow, bias=bias)
    linear = make_linear(weight, bias, ops)
    return lambda hidden: linear(hidden.float())


class ExpertsBeside:
    """Experts in addition to the dense MLP (Gemma 4). The router reads the residual stream with a norm of its own, and
    each expert has a factor for its routing weight."""

    def __init__(self, spec: DecoderSpec, moe: MoeSpec, index: int, weights: Weights, ops: Ops) -> None:
        prefix = f"model.layers.{index}."
        self._moe, self._ops, self._eps, self._group = moe, ops, spec.norm_eps, weights.group
        names = (("post", 1), ("pre", 2), ("post", 2))
        self._after_mlp, self._before, self._after = (
            weights.norm(f"{prefix}{each}_feedforward_layernorm_{of}.weight", spec.hidden_size) for each, of in names
        )
        scale = weights.float32(f"{prefix}router.scale", (spec.hidden_size,)) * spec.hidden_size**-0.5
        router = weights.float32(f"{prefix}router.proj.weight", (moe.num_experts, spec.hidden_size))
        self._router = make_router(router * scale, None, weights, ops)
        self._no_scale = torch.ones_like(scale)
        self._growth = weights.float32(f"{prefix}router.per_expert_scale", (moe.num_experts,))
        self.experts = Experts(spec, moe, prefix, index, weights)

    def __call__(self, update: Tensor, stream: Tensor) -> Tensor:
        """update [T, hidden], the all-reduced MLP output, and stream [T, hidden] -> update plus the experts' output."""
        ops, eps = self._ops, self._eps
        logits = self._router(ops.rms_norm(stream, self._no_scale, eps))
        ids, shares = ops.choose_experts(logits, None, self._moe)
        chosen = self.experts(ops.rms_norm(stream, self._before, eps), ids, shares * self._growth[ids.long()])
        chosen = ops.rms_norm(self._group.sum(chosen), self._after, eps)
        return ops.rms_norm(update, self._after_mlp, eps) + chosen


class Experts:
    """The rank's experts. Tokens are sorted by expert, so that an expert's weights are read once for all its tokens.

    With a plan, experts are placed in slots, some in several, and a rank holds consecutive slots; otherwise each expert
    is a slot. If one call computes all experts, the shared MLP is split into experts of the common width.
    """

    def __init__(
        self, spec: DecoderSpec, moe: MoeSpec, prefix: str, layer: int, weights: Weights, shared: Mlp | None = None
    ) -> None:
        """`layer` counts only the layers with experts, as plans do."""
        self.num_experts = moe.num_experts
        self.counter: ExpertCounter | None = None  # set if experts move by their load (EPLB)
        self._table: SlotTable | None = None
        self._first, self._num_slots = 0, moe.num_experts
        held = list(range(moe.num_experts))  # the expert in each of this rank's slots
        if weights.placement is not None:
            placed = weights.placement.phy2log[layer].tolist()
            self._num_slots = len(placed)
            self._first, end = weights.group.share(self._num_slots)
            held = placed[self._first : end]
            self._table = SlotTable(weights.placement, layer, weights.group.device)
        size, is_split = moe.intermediate_size, weights.placement is None
        self.expert_slots = [
            Mlp(spec, size, f"{prefix}experts.{expert}.", weights, weights.ops, moe.projections, is_split)
            for expert in held
        ]
        self._activation = spec.activation
        # The shared MLP stays separate if there is a plan, which cannot place it, or if adapters change it.
        always = None if weights.placement is not None or weights.has_adapters else shared
        self._fused, self.num_shared = _fuse(self.expert_slots, always, weights.ops)
        for expert in sorted(set(range(moe.num_experts)) - set(held)):
            # These experts are part of the checkpoint, but only the ranks that hold them read them.
            shape = size, spec.hidden_size
            first = spec.activation in UNGATED  # without a gate, there are only the last two projections
            for name, of in zip(moe.projections[first:], (shape, shape, shape[::-1])[first:], strict=True):
                weights.pass_over(f"{prefix}experts.{expert}.{name}.weight", of)
                if spec.mlp_bias:
                    weights.pass_over(f"{prefix}experts.{expert}.{name}.bias", of[:1])

    @property
    def is_fused(self) -> bool:
        """True if one call computes all experts. If not, the host waits for the number of tokens of each expert."""
        return self._fused is not None

    def replace(self, plan: Plan, layer: int) -> None:
        """Use another plan from the next step on. Its experts must already be in the slots."""
        assert self._table is not None, "experts without a plan do not move"
        self._table.replace(plan, layer)

    def __call__(self, hidden: Tensor, ids: Tensor, shares: Tensor, added: Tensor | None = None) -> Tensor:
        """hidden [T, hidden], ids and shares [T, k] -> [T, hidden]: weighted sum of the rank's experts plus `added`."""
        num_tokens, top_k = ids.shape
        if self.counter is not None:
            self.counter.add(ids)
        slots = ids if self._table is None else self._table.expert_slots(ids)
        if self._fused is not None:
            return self._fused(hidden, slots, shares, first=self._first, activation=self._activation, added=added)
        order = slots.flatten().argsort(stable=True)  # [T * k] by slot
        counts = torch.bincount(slots.flatten(), minlength=self._num_slots).tolist()
        out = hidden.new_zeros(num_tokens * top_k, hidden.shape[1])
        start, end = self._first, self._first + len(self.expert_slots)
        asked = [(expert, count) for expert, count in zip(self.expert_slots, counts[start:end], strict=True) if count]
        if asked:
            experts, ours = zip(*asked, strict=True)
            before = sum(counts[:start])
            places = order[before : before + sum(ours)]
            out.index_copy_(0, places, Mlp.each(experts, ours, hidden.index_select(0, places // top_k)))
        # A token's experts are summed in the order of the router's choice, so the sum does not depend on the batch.
        total = (out.view(num_tokens, top_k, hidden.shape[1]) * shares[..., None]).sum(1).to(hidden.dtype)
        return total if added is None else total + added


def _fuse(slots: list[Mlp], shared: Mlp | None, ops: Ops) -> tuple[Callable[..., Tensor] | None, int]:
    """Return the kernel for all slots at once, or None, and the number of slots that `shared` adds after them. The
    kernel has the stacked weights; the weights of the slots become views of these."""
    layers = [mlp.gate_up for mlp in slots], [mlp.down for mlp in slots]
    kinds = [{linear.kind for linear in each} for each in layers]
    if ops.fused_experts is None or any(len(each) != 1 or None in each for each in kinds):
        return None, 0
    biases = [[linear.bias for linear in each if linear.bias is not None] for each in layers]
    pieces = [] if shared is None or any(biases) else _cut(shared, slots[0])
    up, down = (
        stack([*(linear.weights[0] for linear in each), *more])
        for each, more in zip(layers, ([piece[at] for piece in pieces] for at in (0, 1)), strict=True)
    )
    stacked = tuple(stack_tensors(each) if each else None for each in biases)
    return partial(ops.fused_experts, gate_up=up, down=down, biases=stacked), len(pieces)


def _cut(shared: Mlp, expert: Mlp) -> list[tuple[Weight, Weight]]:
    """Split `shared` into experts as wide as `expert` that sum to it; [] if its width or formats do not allow it."""
    layers = shared.gate_up, shared.down, expert.gate_up, expert.down
    formats = {linear.weights[0].format for linear in layers}
    if any(linear.kind is None or linear.bias is not None for linear in layers) or len(formats) > 1:
        return []
    gate_up, whole = shared.gate_up.weights[0], shared.down.weights[0]
    num, rest = divmod(whole.shape[1], expert.down.weights[0].shape[1])
    if rest or whole.format.is_packed:
        return []
    size = whole.shape[1] // num

    def rows(tensor: Tensor, index: int) -> Tensor:
        """Return part `index` of `num` of the gate's rows, if there is a gate, followed by that of up's rows."""
        parts: Tensor = tensor.unflatten(0, (1 + shared.is_gated, num, -1))[:, index].flatten(0, 1)
        return parts

    def columns(index: int) -> Weight:
        part = whole._replace(codes=whole.codes.narrow(1, index * size, size))
        if whole.scales is None:
            return part
        return part._replace(scales=pad_scales(whole.scales.narrow(1, index * size // BLOCK, size // BLOCK)))

    return [(gate_up.like(rows(tensor, index) for tensor in gate_up.tensors()), columns(index)) for index in range(num)]


class ExpertCounter(NamedTuple):
    """Counts on the device how often a layer's tokens choose each expert. The host never waits for it, so a CUDA graph
    can contain it."""

    counts: Tensor  # [experts] int64
    num_tokens: Tensor  # [1] int64: number of the step's tokens; the padding of a graph's batch follows them

    def add(self, ids: Tensor) -> None:
        """Count the experts that each token chose, ids [T, k]."""
        is_real = torch.arange(len(ids), device=ids.device) < self.num_tokens
        self.counts.index_add_(0, ids.flatten(), is_real[:, None].expand(ids.shape).flatten().long())


class SlotTable:
    """One layer of a plan as tensors, which map a token and its expert to a slot, identically on every rank.

    `eplb.choose` is the same rule in numpy and explains it. The tensors are wide enough for any plan with this number
    of slots, and are updated in place when the plan changes, because captured CUDA graphs read them.
    """

    def __init__(self, plan: Plan, layer: int, device: torch.device) -> None:
        width = plan.slots - plan.experts + 1  # the maximum number of copies of one expert
        self._cdf = torch.empty(plan.experts, width, dtype=torch.int64, device=device)
        self._slots = torch.empty_like(self._cdf)
        self.replace(plan, layer)

    def replace(self, plan: Plan, layer: int) -> None:
        for tensor, table, filler in ((self._cdf, plan.cdf, WHOLE), (self._slots, plan.log2phy, -1)):
            wide = np.full(tensor.shape, filler, dtype=np.int64)
            wide[:, : table.shape[2]] = table[layer]
            tensor.copy_(send(wide, tensor.device))

    def expert_slots(self, ids: Tensor) -> Tensor:
        """Map experts [T, k] of token 0, 1, … to slots [T, k]."""
        ids = ids.long()
        token = torch.arange(len(ids), device=ids.device)[:, None]
        mixed = ((token * TOKEN_STEP & U32) + ids * EXPERT_STEP) & U32
        draw = mixed * WHOLE >> 32  # below WHOLE
        copy = (self._cdf[ids] <= draw[..., None]).sum(-1)
        return self._slots[ids, copy]
