"""Validation, decaying averages and smoothing of expert loads.

A load is an array [layers, experts] with the number of tokens routed to each expert. Errors name the field, the value
and the limit.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.order import Shares

MAX_SLOTS = 32_767  # slots and experts are stored as int16
_PRIOR = 2.0**-12  # load added to every expert, as a fraction of the layer's mean load


def validate_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return the load as float64; raise ValueError if it is not a valid [layers, experts] array."""
    array = np.asarray(load)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"load: values of type {array.dtype}, must be real numbers")
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"load: shape {array.shape}, must be [layers, experts] with at least one of each")
    if array.shape[1] > MAX_SLOTS:
        raise ValueError(f"load: {array.shape[1]} experts, must be at most {MAX_SLOTS}")
    array = array.astype(np.float64)
    # The negated comparison also catches NaN.
    wrong = ~((array >= 0) & (array < np.inf))
    if wrong.any():
        layer, expert = (int(at) for at in np.argwhere(wrong)[0])
        raise ValueError(
            f"load: {array[layer, expert]} for expert {expert} of layer {layer}, must be finite and at least 0"
        )
    return array


def check_shape(experts: int, slots: int, ranks: int) -> None:
    """Raise ValueError unless the slots hold all experts and divide evenly among the ranks."""
    for field, value in (("slots", slots), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{field}: {value!r}, must be an integer of at least 1")
    if not experts <= slots <= MAX_SLOTS:
        raise ValueError(f"slots: {slots}, must be at least the {experts} experts and at most {MAX_SLOTS}")
    if slots % ranks:
        raise ValueError(f"ranks: {ranks}, must divide the {slots} slots")


def smooth(load: NDArray[np.float64]) -> Shares:
    """Return the load used for planning: each layer scaled to at most 1, plus a small prior for every expert.

    Without the prior, all spare slots of a layer with few or no tokens would go to the expert with the lowest id, and
    an expert without tokens so far would count as free forever. Scaling by powers of two changes no plan and keeps
    float32 from overflowing.
    """
    exponent = np.frexp(load.max(axis=1, keepdims=True))[1]
    scaled = np.ldexp(load, -exponent)
    mean = scaled.mean(axis=1, keepdims=True)
    return np.where(mean > 0, scaled + mean * _PRIOR, 1.0).astype(np.float32)


class LoadTracker:
    """Exponentially decaying token counts: a step's counts have weight 1 when new and 1/e after `window` steps.

    A decaying sum stores one number per layer and expert; a sliding window would store one per step as well.
    """

    def __init__(self, layers: int, experts: int, *, window: int) -> None:
        for field, value in (("layers", layers), ("experts", experts), ("window", window)):
            if value < 1:
                raise ValueError(f"{field}: {value}, must be at least 1")
        self._window = window
        self._load = np.zeros((layers, experts))

    def add(self, counts: ArrayLike, num_steps: int) -> None:
        """Add the counts [layers, experts] of `num_steps` steps; steps without tokens count as steps.

        The counts are treated as spread evenly over these steps, although the steps differ in age.
        """
        counts = validate_load(counts)
        if counts.shape != self._load.shape:
            raise ValueError(f"counts: shape {counts.shape}, must be {self._load.shape}")
        if num_steps < 1:
            raise ValueError(f"num_steps: {num_steps}, must be at least 1")
        self._load *= np.exp(-num_steps / self._window)
        # expm1 is exact also where 1 - exp(-1 / window) is zero
        self._load += counts * (np.expm1(-num_steps / self._window) / (np.expm1(-1 / self._window) * num_steps))

    def load(self) -> NDArray[np.float64]:
        """Return the decayed load [layers, experts] to plan with."""
        return self._load.copy()

    def check(self) -> None:
        assert np.isfinite(self._load).all() and (self._load >= 0).all()
