"""The choice of a replica, slowly and from the formulas, in numpy: what csrc/route_choice.c must agree with."""

import numpy as np
import numpy.typing as npt

from penstock.router.placement.load import Column, LoadTable, PolicyConfig

TIE_S = 1e-6


def scores(fleet: LoadTable, cached: Column, num_tokens: int, now_s: float, policy: PolicyConfig) -> Column:
    """Of predicted-ttft, whether open or not."""
    own = num_tokens - np.minimum(cached, num_tokens - 1)
    done = np.minimum((now_s - fleet.head_since) * fleet.speed, fleet.head)
    backlog = fleet.queued - np.maximum(done, 0)
    overflow = np.maximum(fleet.held + num_tokens - fleet.capacity, 0)
    share = fleet.filled * fleet.per_capacity
    crowding = share / share[fleet.capacity > 0].mean() if share.any() else share
    ttft = (backlog + own + overflow) / fleet.speed + fleet.delay * fleet.active
    score: Column = ttft + policy.wear * crowding * own / fleet.speed
    return score


def equals(scores: Column, is_open: npt.NDArray[np.bool_]) -> set[int]:
    """The rows among which a lot decides."""
    scores = np.where(is_open, scores, np.inf)
    return set(np.flatnonzero(scores <= scores.min() + TIE_S).tolist())
