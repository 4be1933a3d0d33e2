"""The load as it is remembered: counts of routed tokens that fade with age.

The executor counts on the device and hands over what has come together since the last time. A fading sum needs one
number per layer and expert, where a window of steps needs one per step as well; old traffic loses its say just so.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.load import checked


class LoadTracker:
    """A step's counts weigh 1 when they are new and 1/e after `window` steps."""

    def __init__(self, layers: int, experts: int, *, window: int) -> None:
        for field, value in (("layers", layers), ("experts", experts), ("window", window)):
            if value < 1:
                raise ValueError(f"{field}: {value}, must be at least 1")
        self.window = window
        self.num_steps = 0
        self._load = np.zeros((layers, experts))

    def add(self, counts: ArrayLike, num_steps: int) -> None:
        """Take the counts [layers, experts] of `num_steps` steps. Steps without tokens count as steps.

        Ages differ within one batch of steps; the counts are taken as spread evenly over it.
        """
        counts = checked(counts)
        if counts.shape != self._load.shape:
            raise ValueError(f"counts: shape {counts.shape}, must be {self._load.shape}")
        if num_steps < 1:
            raise ValueError(f"num_steps: {num_steps}, must be at least 1")
        fade = np.exp(-1 / self.window)
        self._load *= fade**num_steps
        self._load += counts * ((1 - fade**num_steps) / ((1 - fade) * num_steps))
        self.num_steps += num_steps

    def load(self) -> NDArray[np.float64]:
        """What to plan with: [layers, experts]."""
        return self._load.copy()

    def forget(self) -> None:
        """Start over: the model or its routing has changed."""
        self._load[:] = 0
        self.num_steps = 0

    def check(self) -> None:
        assert np.isfinite(self._load).all() and (self._load >= 0).all()
        assert self.num_steps > 0 or not self._load.any()


def count_tokens(experts: ArrayLike, num_experts: int, num_tokens: int) -> NDArray[np.int64]:
    """Tokens per expert, [layers, num_experts], from routed ids [layers, tokens, experts per token].

    The first `num_tokens` tokens are real, the rest is padding and counts nothing. What the device's counters are
    tested against.
    """
    ids = np.asarray(experts)
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise ValueError(f"experts: {ids.dtype} of shape {ids.shape}, must be integers of [layers, tokens, experts]")
    if not 0 <= num_tokens <= ids.shape[1]:
        raise ValueError(f"num_tokens: {num_tokens}, must lie within 0 to {ids.shape[1]}")
    ids = ids[:, :num_tokens].reshape(len(ids), -1).astype(np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < num_experts):
        raise ValueError(f"experts: {ids.min()} to {ids.max()}, must lie within 0 to {num_experts - 1}")
    cells = ids + np.arange(0, len(ids) * num_experts, num_experts)[:, None]
    return np.bincount(cells.ravel(), minlength=len(ids) * num_experts).reshape(-1, num_experts)
