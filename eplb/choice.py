"""Which copy serves a token: a function of the token's index and the expert alone, so every rank finds the same.

The index is the token's place in the batch that all ranks of the group have in common. Multiples of an irrational
fraction of 2^32 fall evenly: any run of consecutive tokens is split closer to the wanted shares than drawing lots
would. The expert turns the sequence, so that a token's experts do not all take their first copy.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.maps import WHOLE, Plan

TOKEN_STEP = 2_654_435_769  # 2^32 / golden ratio
EXPERT_STEP = (
    1_779_033_703  # 2^32 * the fraction of the root of 2: near no simple fraction, nor to multiples of the other
)
_U32 = 0xFFFF_FFFF
MAX_TOKEN = 0x7FFF_FFFF  # so that the product stays below 2^63: int64 does on every device


def choose(plan: Plan, layer: int, tokens: ArrayLike, experts: ArrayLike) -> NDArray[np.int64]:
    """The physical slot for every (token index, expert); the two broadcast against each other."""
    token, expert = np.broadcast_arrays(np.asarray(tokens, np.int64), np.asarray(experts, np.int64))
    if expert.size and not (expert.min() >= 0 and expert.max() < plan.experts):
        raise ValueError(f"experts: {expert.min()} to {expert.max()}, must lie within 0 to {plan.experts - 1}")
    if token.size and not (token.min() >= 0 and token.max() <= MAX_TOKEN):
        raise ValueError(f"tokens: {token.min()} to {token.max()}, must lie within 0 to {MAX_TOKEN}")
    mixed = ((token * TOKEN_STEP & _U32) + expert * EXPERT_STEP) & _U32
    draw = mixed * WHOLE >> 32  # 0 to 65534: a copy of weight 0 is never drawn
    copy = (plan.cdf[layer, expert] <= draw[..., None]).sum(-1)
    return plan.log2phy[layer, expert, copy].astype(np.int64)
