"""How layers are put into groups, and how much of a pool a request needs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.executor.batch import StatePages
from penstock.executor.cache_layout import LayerCache, plan_layout
from penstock.executor.models.recurrent_layers import state_of
from penstock.executor.models.spec import ConvSpec, DeltaSpec, MambaSpec
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, GroupInfo
from penstock.executor.step.memory import allocate_kv, layer_pages, plan_kv
from tests.support.refusals import cases, table

FULL, SLIDING, WIDER, STATE = LayerCache(), LayerCache(64), LayerCache(128), LayerCache(units=5)


def every(period: int, num: int) -> list[LayerCache]:
    return [FULL if index % period == period - 1 else SLIDING for index in range(num)]


LAYERS = {"FULL": FULL, "SLIDING": SLIDING, "WIDER": WIDER, "every": every}


@pytest.mark.parametrize(("layers", "longest", "depth", "groups"), cases(__file__, "layers", **LAYERS))
def test_layers_of_one_kind_share_pages(layers: list[LayerCache], longest: int, depth: int, groups: list[int]) -> None:
    layout = plan_layout(layers, longest, layer_bytes=64)
    assert layout.depth == depth and [group.window for group in layout.groups] == groups
    assert len(set(layout.places)) == len(layers), "no two layers lie at the same place"
    for layer, (group, place) in zip(layers, layout.places, strict=True):
        assert place < depth
        assert layout.groups[group].window in (0, layer.window)


def test_states_lie_in_units_of_one_size_over_pages_that_hold_at_least_one() -> None:
    layout = plan_layout([STATE, FULL, STATE, STATE], 1000, layer_bytes=256, unit_bytes=1000)
    assert layout.unit_bytes == 1024 and layout.depth == 4 and layout.units_per_page == 1
    assert layout.groups == (GroupInfo(), GroupInfo("state", pages=15))
    assert layout.places == ((1, 0), (0, 0), (1, 5), (1, 10))
    kv = allocate_kv(3, layout.depth, 2, 4, 8, torch.float32, torch.device("cpu"))
    pages = layer_pages(kv, layout)
    assert isinstance(pages[2], StatePages) and pages[2][1:] == (5, 1, 1024)
    assert pages[2].base.shape == (3, 1024) and pages[2].base.data_ptr() == kv.data_ptr()
    small = plan_layout([STATE, FULL, STATE], 1000, layer_bytes=256, unit_bytes=60)
    assert small.depth == 1 and small.units_per_page == 4 and small.groups[1].pages == 3


def test_the_pages_of_a_request_follow_from_its_groups() -> None:
    groups = [GroupInfo(), GroupInfo("window", 33), GroupInfo("state", pages=7)]
    assert [group.most_pages(1000, 64, 16) for group in groups] == [63, 7, 21]
    assert [group.most_pages(20, 64, 16) for group in groups] == [2, 2, 21]
    config = ExecutorConfig(block_size=16, kv_cache_bytes=92 * 100, max_num_batched_tokens=64)
    plan = plan_kv(config, 100, 4000, RankGroup(), groups=groups)
    assert plan.num_blocks == 92 and plan.max_model_len == 63 * 16
    with pytest.raises(ExecutorError, match="holds 20 blocks of 100 bytes; at least 24 are needed"):
        plan_kv(ExecutorConfig(kv_cache_bytes=2000), 100, 4000, RankGroup(), groups=groups)


SPEC: Any = SimpleNamespace(hidden_size=62)
DELTA, CONV = DeltaSpec(2, 4, 16, 24, 4, False), ConvSpec(3, False)
MAMBA = MambaSpec(2, 12, 16, 24, 4, True, False, 1e-6)
PARTS = {"DELTA": DELTA, "CONV": CONV, "MAMBA": MAMBA}


@pytest.mark.parametrize(("part", "ranks", "message"), table(__file__, "parts of ranks", **PARTS))
def test_heads_and_channels_that_ranks_cannot_share_are_refused_by_number(part: Any, ranks: int, message: str) -> None:
    with pytest.raises(ExecutorError, match=f"^{message}"):
        state_of(SPEC, part, torch.float32, ranks)


def test_a_rank_has_its_share_of_a_state() -> None:
    assert state_of(SPEC, MAMBA, torch.float32, 4) == (1 + 3, max(16 * 24 * 4, 3 * (2 * 16 + 3 * 24) * 4))
    assert state_of(SPEC, DELTA, torch.float32, 2) == (1 + 2, max(16 * 24 * 4, 3 * (2 * 16 + 2 * 24) * 4))
