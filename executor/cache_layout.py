"""Which layers share pages: a model's layers in groups by what they keep, and where each lies in the pages of its group.

All attention groups have pages of one size, `depth` layers deep, so that every group can take any page of the pool. What a
model has fewer of is padded: a little is lost where the numbers of layers do not divide. A model whose layers all
keep the same has one group with all of them. docs/caches.md has the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.executor.protocol import GroupInfo

MAX_GROUPS = 8  # each has tables of its own, which the host has to keep and to send
FULL_WEIGHT = 8  # a padded layer of full attention costs that much more: it is never given back
UNIT_ALIGNMENT = 64


class LayerCache(NamedTuple):
    """What one layer keeps of a request: keys and values of all positions, or of a window, or a state of so many units."""

    window: int | None = None
    units: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[GroupInfo, ...] = (GroupInfo(),)
    depth: int = 1  # layers in a page
    places: tuple[tuple[int, int], ...] = ()  # each layer's group, and its number in the page, or its first unit
    unit_bytes: int = 0
    units_per_page: int = 0

    @property
    def attention_groups(self) -> int:
        return sum(group.kind != "state" for group in self.groups)

    @property
    def state_pages(self) -> int:
        return self.groups[-1].pages

    @property
    def group_of(self) -> tuple[int, ...]:
        """As `ForwardBatch` has it."""
        return tuple(group for group, _ in self.places) if len(self.groups) > 1 else ()


def plan_layout(layers: Sequence[LayerCache], longest: int, layer_bytes: int, unit_bytes: int = 0) -> CacheLayout:
    """`longest`: what no window needs to reach beyond. `layer_bytes`: of a block in one attention layer. `unit_bytes`: of
    a state's largest unit."""
    kinds: dict[int, list[int]] = {}  # window, 0 being none → layers
    for index, layer in enumerate(layers):
        if not layer.units:
            kinds.setdefault(layer.window if layer.window and layer.window < longest else 0, []).append(index)
    kinds = dict(sorted(kinds.items()))
    assert kinds, "a model without attention"
    depth = _choose_depth({window: len(members) for window, members in kinds.items()})
    groups: list[GroupInfo] = []
    places = [(0, 0)] * len(layers)
    for window, members in kinds.items():
        for place, member in enumerate(members):
            places[member] = len(groups) + place // depth, place % depth
        groups += [GroupInfo("window", window) if window else GroupInfo()] * -(-len(members) // depth)
    if not unit_bytes:
        return CacheLayout(tuple(groups), depth, tuple(places))
    unit_bytes = -(-unit_bytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
    depth = max(depth, -(-unit_bytes // layer_bytes))
    per_page = depth * layer_bytes // unit_bytes
    first_units = accumulate((layer.units for layer in layers), initial=0)
    for index, (layer, first) in enumerate(zip(layers, first_units, strict=False)):
        if layer.units:
            places[index] = len(groups), first
    groups.append(GroupInfo("state", pages=-(-sum(layer.units for layer in layers) // per_page)))
    return CacheLayout(tuple(groups), depth, tuple(places), unit_bytes, per_page)


def _choose_depth(counts: dict[int, int]) -> int:
    """Layers in a page, for so many of each kind: what loses least, and the deepest of these."""

    def loss(depth: int) -> tuple[bool, int, int]:
        padded = {window: -count % depth for window, count in counts.items()}
        num_groups = sum(-(-count // depth) for count in counts.values())
        lost = sum(each * (1 if window else FULL_WEIGHT) for window, each in padded.items())
        return num_groups > MAX_GROUPS, lost, -depth

    return min(range(1, max(counts.values()) + 1), key=loss)
