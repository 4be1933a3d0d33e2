"""The models and loads that the planner is measured with; made, not recorded."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKENS = 1 << 20  # in the window that a load was counted over
KINDS = ("zipf", "logn1", "logn0.5")
DRIFTS = ("noise", "0.1", "0.3", "switch")


class Cell(NamedTuple):
    """A model on a number of ranks. With more than one node it is planned by groups."""

    model: str
    layers: int
    experts: int
    experts_per_token: int
    slots: int
    ranks: int
    groups: int = 1
    nodes: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} {self.ranks} ranks, {self.slots} slots" + (", in groups" if self.nodes > 1 else "")

    @property
    def is_redundant(self) -> bool:
        return self.slots > self.experts


CELLS = (
    Cell("V2-Lite", 26, 64, 6, 64, 8),
    Cell("V2-Lite", 26, 64, 6, 72, 8),
    Cell("V3", 58, 256, 8, 256, 32),
    Cell("V3", 58, 256, 8, 288, 32),
    Cell("V3", 58, 256, 8, 288, 32, 8, 4),
    Cell("V3", 58, 256, 8, 320, 64),
    Cell("V3", 58, 256, 8, 320, 64, 8, 8),
    Cell("Qwen3-235B", 94, 128, 8, 128, 8),
    Cell("Qwen3-235B", 94, 128, 8, 144, 8),
    Cell("Qwen3-235B", 94, 128, 8, 128, 16),
    Cell("Qwen3-235B", 94, 128, 8, 160, 16),
)
# Drift is met by copies; without any, what cannot be reached is not a matter of moves.
DRIFTING = tuple(cell for cell in CELLS if cell.is_redundant and cell.nodes == 1)


def popularity(cell: Cell, kind: str, seed: int) -> NDArray[np.float64]:
    """How likely a token goes to each expert: `zipf` with exponent 1, or lognormal with the sigma in the name."""
    rng = np.random.default_rng(seed)
    if kind == "zipf":
        weights = np.stack([rng.permutation(1 / np.arange(1, cell.experts + 1)) for _ in range(cell.layers)])
    else:
        weights = np.exp(rng.normal(0, float(kind.removeprefix("logn")), (cell.layers, cell.experts)))
    return weights / weights.sum(1, keepdims=True)


def load(cell: Cell, kind: str, seed: int) -> NDArray[np.int64]:
    return _counted(cell, popularity(cell, kind, seed), seed)


def drifted(cell: Cell, kind: str, seed: int, drift: str) -> NDArray[np.int64]:
    """The load a while later: another sample, every expert off by a lognormal factor, or new favourites."""
    base = popularity(cell, kind, seed)
    if drift == "switch":
        base = popularity(cell, kind, seed + 100)
    elif drift != "noise":
        base = base * np.exp(np.random.default_rng(seed + 200).normal(0, float(drift), base.shape))
    return _counted(cell, base / base.sum(1, keepdims=True), seed + 300)


def _counted(cell: Cell, share: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed + 1000).poisson(share * TOKENS * cell.experts_per_token)
