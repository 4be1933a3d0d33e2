"""The choice of a replica, slowly and from the formulas, in numpy: what csrc/route_choice.c must agree with."""

import numpy as np
import numpy.typing as npt

from penstock.router.placement.load import Column, LoadTable, PolicyConfig

TIE_S = 1e-6


def cached_tokens(
    counts: npt.NDArray[np.int32], slots: npt.NDArray[np.int64], block_size: int, policy: PolicyConfig
) -> Column:
    """`slots`: rows device, host, disk, older; a column per replica."""
    blocks = np.maximum(counts[slots[0]], counts[slots[3]]).astype(float)
    reach = blocks.copy()
    for layer, credit in ((1, policy.host_credit), (2, policy.disk_credit)):
        blocks += credit * np.maximum(counts[slots[layer]] - reach, 0)
        reach = np.maximum(reach, counts[slots[layer]])
    tokens: Column = blocks * block_size
    return tokens


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
