"""Groups a model's layers by the kind of cache they need, and assigns each layer a place in the pages of its group.

All attention groups have pages of the same size, `depth` layers deep, so that any group can use any page of the pool.
If the number of layers of a kind is not a multiple of `depth`, its last group is padded, which wastes some memory. A
model whose layers all keep the same has a single group. docs/caches.md explains the whole design.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.executor.protocol import GroupInfo

MAX_GROUPS = 8  # each group has its own block tables, which the host stores and sends to the device
FULL_WEIGHT = 8  # relative cost of a padded full-attention layer: its memory is never freed while the request runs
UNIT_ALIGNMENT = 64


class LayerCache(NamedTuple):
    """One layer's cache for a request: the keys and values of all positions or of a window, or `units` of state."""

    window: int | None = None
    units: int = 0


class CacheNeeds(NamedTuple):
    """The cache that a model's layers need: that of each, the bytes of the largest unit of a state, and the number of
    tensors that an attention layer keeps of a token, with their width."""

    layers: tuple[LayerCache, ...]
    unit_bytes: int
    kv_parts: int
    kv_width: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    groups: tuple[GroupInfo, ...] = (GroupInfo(),)
    depth: int = 1  # layers per page
    places: tuple[tuple[int, int], ...] = ()  # per layer: its group and its index in the page, or its first state unit
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
        """Each layer's group in the form of `ForwardBatch.group_of`: empty if there is only one group."""
        return tuple(group for group, _ in self.places) if len(self.groups) > 1 else ()


def plan_pages(needs: CacheNeeds, longest: int, block_size: int, number_bytes: int) -> tuple[CacheLayout, int]:
    """Return the layout of a model's cache, and the bytes of a page; `number_bytes` is the size of a key's number."""
    layer_bytes = needs.kv_parts * block_size * needs.kv_width * number_bytes
    layout = plan_layout(needs.layers, longest, layer_bytes, needs.unit_bytes)
    return layout, layout.depth * layer_bytes


def plan_layout(layers: Sequence[LayerCache], longest: int, layer_bytes: int, unit_bytes: int = 0) -> CacheLayout:
    """Plan the layout. A window of at least `longest` positions counts as full attention. `layer_bytes` is the size of
    one attention layer's block, `unit_bytes` that of a state's largest unit."""
    kinds: dict[int, list[int]] = {}  # window (0: full attention) → layers
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
    """Return the layers per page that waste least, the most if several do; `counts`: window → number of layers."""

    def loss(depth: int) -> tuple[bool, int, int]:
        padded = {window: -count % depth for window, count in counts.items()}
        num_groups = sum(-(-count // depth) for count in counts.values())
        lost = sum(each * (1 if window else FULL_WEIGHT) for window, each in padded.items())
        return num_groups > MAX_GROUPS, lost, -depth

    return min(range(1, max(counts.values()) + 1), key=loss)
