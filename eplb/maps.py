"""A plan for a model's experts: the expert in each physical slot, and how its tokens are split over its copies.

    rank            0              1
    slot         0  1  2        3  4  5
    phy2log     [7, 2, 0,       7, 1, 3]      expert in each slot
    weight          share of that expert's tokens that go to this slot, in 65535ths: 40000 and 25535 for expert 7

All other tables follow from these two: the dispatcher reads log2phy, count and cdf. `balance` rates a plan for a load:
1 means that all ranks carry the same load, 1 / ranks means that one rank carries all of it.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.load import check_shape, validate_load
from penstock.eplb.order import Ids, Indices

WHOLE = 65_535  # the weights of an expert's copies add up to this
TOKEN_STEP = 2_654_435_769  # 2^32 / golden ratio
# 2^32 times the fractional part of the square root of 2: close to no simple fraction and to no multiple of TOKEN_STEP.
EXPERT_STEP = 1_779_033_703
_U32 = 0xFFFF_FFFF
MAX_TOKEN = 0x7FFF_FFFF  # keeps the product below 2^63, so int64 suffices on every device

Load = NDArray[np.float64]  # [layers, experts]
Weights = NDArray[np.uint16]  # [layers, slots]


@dataclass(frozen=True, eq=False)
class Plan:
    """An immutable placement with its dispatch tables, built by `Plan.of`. Slot s lies on rank s // slots_per_rank."""

    phy2log: Ids  # [layers, slots]: the expert in each slot
    weight: Weights
    log2phy: NDArray[np.int16]  # [layers, experts, max copies]: slots of each expert, ascending, padded with -1
    count: NDArray[np.int16]  # [layers, experts]: number of copies
    cdf: NDArray[np.uint16]  # [layers, experts, max copies]: cumulative weights of the copies, padded with 65535
    ranks: int

    @classmethod
    def of(cls, phy2log: ArrayLike, experts: int, ranks: int, *, weight: ArrayLike | None = None) -> "Plan":
        """Validate the placement and build its plan; without `weight`, the copies of an expert get equal shares."""
        placed = _checked_placement(phy2log, experts)
        check_shape(experts, placed.shape[1], ranks)
        return cls(placed, *_tables(placed, experts, None if weight is None else np.asarray(weight)), ranks)

    @property
    def layers(self) -> int:
        return int(self.phy2log.shape[0])

    @property
    def slots(self) -> int:
        return int(self.phy2log.shape[1])

    @property
    def experts(self) -> int:
        return int(self.count.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.slots // self.ranks

    def with_(self, phy2log: ArrayLike, weight: ArrayLike | None = None) -> "Plan":
        """Return another plan for the same model on the same ranks."""
        return Plan.of(phy2log, self.experts, self.ranks, weight=weight)

    def digest(self) -> bytes:
        """Return a hash of the plan, with which ranks verify that they hold the same one."""
        sizes = np.array([self.layers, self.experts, self.slots, self.ranks], "<u4")
        parts = sizes, self.phy2log.astype("<i2"), self.weight.astype("<u2")
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).digest()

    def check(self) -> None:
        """Assert that the tables agree: each slot is listed once for its expert, and the weights add up."""
        layer, expert, copy = np.nonzero(self.log2phy >= 0)
        slot = self.log2phy[layer, expert, copy]
        assert len(slot) == self.layers * self.slots
        assert (self.phy2log[layer, slot] == expert).all()
        assert (copy < self.count[layer, expert]).all() and (self.count >= 1).all()
        assert (self.count.sum(1) == self.slots).all()
        steps = np.diff(self.cdf.astype(np.int64), axis=2, prepend=0)
        assert (steps >= 0).all() and (self.cdf[..., -1] == WHOLE).all()
        assert (steps[layer, expert, copy] == self.weight[layer, slot]).all()


def max_copies(experts: int, slots: int, ranks: int) -> int:
    """Return the maximum number of copies of one expert: one per rank, or more if the slots cannot be filled so."""
    return max(min(ranks, slots - experts + 1), -(-slots // experts))


def _checked_placement(phy2log: ArrayLike, experts: int) -> Ids:
    array = np.asarray(phy2log)
    if array.dtype.kind not in "iu" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"phy2log: {array.dtype} of shape {array.shape}, must be integers of [layers, slots]")
    if array.min() < 0 or array.max() >= experts:
        raise ValueError(f"phy2log: experts {array.min()} to {array.max()}, must lie within 0 to {experts - 1}")
    return np.ascontiguousarray(array, np.int16)


def _tables(
    phy2log: Ids, experts: int, weight: NDArray[np.generic] | None
) -> tuple[Weights, NDArray[np.int16], NDArray[np.int16], NDArray[np.uint16]]:
    """Build (weight, log2phy, count, cdf) with one stable sort, which is a radix sort for int16.

    The tables are only as wide as the largest number of copies: with 64 ranks an expert could have 64 copies but has
    about 20, and touching the pages of the empty columns took a quarter of the planning time.
    """
    layers, slots = phy2log.shape
    slot = np.argsort(phy2log, axis=1, kind="stable")  # slots grouped by expert
    cell = phy2log + np.arange(0, layers * experts, experts)[:, None]
    count = np.bincount(cell.ravel(), minlength=layers * experts)
    if not count.all():
        layer, expert = divmod(int(count.argmin()), experts)
        raise ValueError(f"phy2log: expert {expert} of layer {layer} has no slot, must have at least 1")
    width = int(count.max())
    end = np.cumsum(count)
    start = end - count
    # The position of each copy in the flat tables: one row per expert, its copies next to each other.
    at = np.arange(layers * slots)
    at += np.repeat(np.arange(0, layers * experts * width, width) - start, count)
    log2phy = np.full(layers * experts * width, -1, np.int16)
    log2phy[at] = slot.ravel()
    cdf = np.full(layers * experts * width, WHOLE, np.uint16)
    slot += np.arange(0, layers * slots, slots)[:, None]
    spread = np.nonzero(np.repeat(count > 1, count))[0]
    at = at[spread]
    owner, copy = np.divmod(at, width)
    if weight is None:
        num = count[owner]
        upto = (copy + 1) * WHOLE // num
        weights = np.full(layers * slots, WHOLE, np.uint16)
        weights[slot.ravel()[spread]] = upto - copy * WHOLE // num
    else:
        weights = _checked_weight(weight, phy2log.shape)
        total = np.cumsum(weights[slot.ravel()], dtype=np.int64)
        before = np.concatenate([[0], total[end[:-1] - 1]])  # sum over all preceding experts
        if not (total[end - 1] - before == WHOLE).all():
            raise ValueError(f"weight: the copies of every expert must add up to {WHOLE}")
        upto = total[spread] - before[owner]
    cdf[at] = upto
    shape = layers, experts, width
    tables = log2phy.reshape(shape), count.astype(np.int16).reshape(shape[:2]), cdf.reshape(shape)
    return weights.reshape(phy2log.shape), *tables


def _checked_weight(weight: NDArray[np.generic], shape: tuple[int, ...]) -> Weights:
    if weight.dtype.kind not in "iu" or weight.shape != shape:
        raise ValueError(f"weight: {weight.dtype} of shape {weight.shape}, must be integers of shape {shape}")
    if weight.min() < 0 or weight.max() > WHOLE:
        raise ValueError(f"weight: {weight.min()} to {weight.max()}, must lie within 0 to {WHOLE}")
    return weight.astype(np.uint16).ravel()


def balance(load: ArrayLike, plan: Plan) -> NDArray[np.float64]:
    """Return mean rank load / largest rank load per layer; 1 for a layer without load."""
    return evenness(validate_load_for(load, plan), plan.phy2log, plan.weight, plan.ranks)


def evenness(load: Load, phy2log: Ids, weight: Weights, ranks: int) -> NDArray[np.float64]:
    """Compute `balance` from a placement and weights instead of a plan."""
    by_rank = rank_loads(load, phy2log, weight, ranks)
    largest = by_rank.max(axis=1)
    even: NDArray[np.float64] = np.divide(by_rank.mean(axis=1), largest, out=np.ones_like(largest), where=largest > 0)
    return even


def rank_loads(load: Load, phy2log: Ids, weight: Weights, ranks: int) -> NDArray[np.float64]:
    """Return the load of every rank, [layers, ranks]; copies share an expert's load by their weights."""
    by_slot = np.take_along_axis(load, phy2log.astype(np.int64), axis=1) * (weight / WHOLE)
    by_rank: NDArray[np.float64] = by_slot.reshape(len(load), ranks, by_slot.shape[1] // ranks).sum(axis=2)
    return by_rank


def validate_load_for(load: ArrayLike, plan: Plan) -> NDArray[np.float64]:
    """Return the validated load; raise ValueError if its shape is not the plan's [layers, experts]."""
    array = validate_load(load)
    if array.shape != (plan.layers, plan.experts):
        raise ValueError(f"load: shape {array.shape}, must be {(plan.layers, plan.experts)} as in the plan")
    return array


def choose(plan: Plan, layer: int, tokens: ArrayLike, experts: ArrayLike) -> Indices:
    """Return the physical slot for every (token index, expert); the two arrays broadcast.

    The choice depends only on the expert and on the token's index in the batch that all ranks share, so every rank
    computes the same slot. Multiples of an irrational fraction of 2^32 are evenly distributed: any run of consecutive
    tokens is split closer to the intended shares than by random draws. The expert offsets the sequence, so that the
    experts of one token do not all use their first copy.
    """
    token, expert = np.broadcast_arrays(np.asarray(tokens, np.int64), np.asarray(experts, np.int64))
    if expert.size and not (expert.min() >= 0 and expert.max() < plan.experts):
        raise ValueError(f"experts: {expert.min()} to {expert.max()}, must lie within 0 to {plan.experts - 1}")
    if token.size and not (token.min() >= 0 and token.max() <= MAX_TOKEN):
        raise ValueError(f"tokens: {token.min()} to {token.max()}, must lie within 0 to {MAX_TOKEN}")
    mixed = ((token * TOKEN_STEP & _U32) + expert * EXPERT_STEP) & _U32
    draw = mixed * WHOLE >> 32  # 0 to 65534, so a copy of weight 0 is never drawn
    copy = (plan.cdf[layer, expert] <= draw[..., None]).sum(-1)
    slot: Indices = plan.log2phy[layer, expert, copy].astype(np.int64)
    return slot
