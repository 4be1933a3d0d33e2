"""The choice of a replica in numpy, from the formulas, with which csrc/route_choice.c must agree."""

import numpy as np
import numpy.typing as npt

from penstock.router.placement.load import Column, LoadTable, PolicyConfig

TIE_S = 1e-6


def scores(fleet: LoadTable, cached: Column, num_tokens: int, now_s: float, policy: PolicyConfig) -> Column:
    """Return the scores of predicted-ttft, also of replicas that are not open."""
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
    """Return the rows among which a lot decides."""
    scores = np.where(is_open, scores, np.inf)
    return set(np.flatnonzero(scores <= scores.min() + TIE_S).tolist())
