"""Copies between a GPU's blocks and the host's: the waits that are needed, and no others.
How layers are put into groups, and how much of a pool a request needs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.executor.batch import StatePages
from penstock.executor.cache_layout import LayerCache, plan_layout
from penstock.executor.models.recurrent_layers import state_of
from penstock.executor.models.spec import ConvSpec, DeltaSpec, MambaSpec
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, GroupInfo, Row
from penstock.executor.step.memory import allocate_kv, layer_pages, plan_kv
from penstock.executor.step.runner import written_blocks
from penstock.executor.tiers.cuda_copies import CudaCopier
from penstock.executor.tiers.transfers import RankTransfers
from tests.support.pretended_gpu import PretendedGpu
from tests.support.pretended_memory import GPU
from tests.support.pretended_streams import Stream
from tests.support.races import Race
from tests.support.refusals import cases, table
from tests.support.twins import torch_inputs

BLOCKS, SLOTS, BYTES = 6, 5, 64


class Rig:
    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu
        self.blocks = torch.zeros(BLOCKS, BYTES, dtype=torch.uint8, device=GPU)
        self.arena = np.zeros((SLOTS, 4096), np.uint8)
        self.ops = Mock(wraps=torch_inputs)
        self.copier = CudaCopier(self.blocks, self.arena, self.ops)
        for block in range(BLOCKS):
            self.blocks[block] = block

    def step(
        self,
        saves: Sequence[tuple[int, int]] = (),
        restores: Sequence[tuple[int, int]] = (),
        writes: Sequence[int] = (),
        reads: Sequence[int] = (),
        reported: Sequence[int] | None = None,
    ) -> None:
        """Run the copies and the rows of a step. reported: the writes that the copier learns of, if not all."""
        self.copier.begin_step(writes if reported is None else reported)
        if saves or restores:
            self.copier.start(saves, restores)
        for block in writes:
            self.blocks[block] = 100 + block
        for block in reads:
            self.blocks[block].sum()

    def has_waited(self, stream: torch.cuda.Stream) -> bool:
        """Return whether the computing stream has waited for all of this pretended stream."""
        return self.gpu.has_waited(self.gpu.stream, cast(Stream, stream))


@pytest.fixture
def rig(gpu: PretendedGpu) -> Rig:
    return Rig(gpu)


def test_rows_and_restores_do_not_wait_for_saves(gpu: PretendedGpu, rig: Rig) -> None:
    rig.step(saves=((1, 1), (2, 2)))
    for _ in range(2):
        rig.step(writes=(3,), reads=(1, 2, 4))
        assert not rig.has_waited(rig.copier._saving)
    rig.step(saves=((1, 3),), restores=((4, 3),))
    rig.step(reads=(3,))
    assert rig.has_waited(rig.copier._restoring) and not rig.has_waited(rig.copier._saving)
    rig.copier.finish()
    assert rig.arena[1, 0] == 1 and rig.arena[2, BYTES - 1] == 2


def test_a_step_launches_one_copy_in_each_direction_for_any_number_of_blocks(rig: Rig) -> None:
    """The kernel was compiled at the start, and what it reads comes from pinned memory, so that the host goes on."""
    assert rig.ops.copy_blocks.call_count == 2
    rig.step(saves=((1, 1), (2, 2), (5, 3)), restores=((4, 3),))
    assert rig.ops.copy_blocks.call_count == 4 and all(rig.gpu.copies)


def test_rows_wait_for_the_restores_of_steps_before_theirs(rig: Rig) -> None:
    rig.arena[1] = 77
    rig.step(restores=((1, 4),), reads=(1,))
    rig.step(reads=(4,))
    assert rig.blocks[4].tolist() == [77] * BYTES
    rig.step(restores=((1, 5),))
    with pytest.raises(Race, match="computing stream reads"):
        rig.blocks[5].sum()


def test_a_block_that_is_being_saved_is_written_by_rows_when_it_is_over(gpu: PretendedGpu, rig: Rig) -> None:
    rig.step(saves=((1, 1),))
    rig.step(writes=(1,))
    assert rig.has_waited(rig.copier._saving)
    rig.step(saves=((1, 2),))
    with pytest.raises(Race, match=r"(?s)computing stream writes.*cuda_copies"):
        rig.step(writes=(1,), reported=())


# The copies and the rows of steps, one step after the other.
OVERWRITES: dict[str, list[dict[str, Any]]] = dict(cases(__file__, "overwrites"))


@pytest.mark.parametrize("case", OVERWRITES)
def test_memory_of_a_copy_is_used_again_only_when_the_copy_is_over(case: str, rig: Rig) -> None:
    """The host does not wait: another rank may have reported the end of a step to the core."""
    for step in OVERWRITES[case]:
        rig.step(**step)


def test_a_store_waits_for_the_copies_of_its_slots_alone(gpu: PretendedGpu, rig: Rig) -> None:
    rig.step(saves=((1, 1),), restores=((2, 2),))
    rig.copier.settle([1, 4])
    gpu.touch_array(rig.arena[1], is_write=False)
    with pytest.raises(Race, match="the host writes"):
        gpu.touch_array(rig.arena[2], is_write=True)
    rig.copier.settle([2])
    gpu.touch_array(rig.arena[2], is_write=True)


def test_rows_write_their_new_blocks_from_the_first_computed_position() -> None:
    fresh = Row(0, 0, 9, True, blocks=(5, 6, 7))
    hit = Row(1, 8, 2, True, blocks=(1, 2, 8))  # two full blocks of others
    whole_hit = Row(2, 7, 1, True, blocks=(1, 2), write_from=8)
    later = Row(3, 12, 1, True, first_block=3, blocks=(9, 10))
    assert written_blocks([fresh, hit, whole_hit, later], 4) == [5, 6, 7, 8, 9, 10]
    assert written_blocks([Row(3, 13, 1, True)], 4) == []


def test_a_closed_copier_leaves_no_host_memory_pinned(gpu: PretendedGpu, rig: Rig) -> None:
    """Another engine of the same process may get the same addresses, and pins them anew."""
    rig.step(saves=((1, 1),))
    with pytest.raises(ExecutorError, match="refuses to pin"):
        CudaCopier(rig.blocks, rig.arena, rig.ops)
    transfers = RankTransfers(rig.arena, rig.copier, {})
    transfers.close()
    CudaCopier(rig.blocks, rig.arena, rig.ops).close()
    assert gpu.races.memory(rig.arena.ctypes.data) is None


FULL, SLIDING, WIDER, STATE = LayerCache(), LayerCache(64), LayerCache(128), LayerCache(units=5)


def every(period: int, num: int) -> list[LayerCache]:
    return [FULL if index % period == period - 1 else SLIDING for index in range(num)]


@pytest.mark.parametrize(("layers", "longest", "depth", "groups"), cases(__file__, "layers", **globals()))
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


@pytest.mark.parametrize(("part", "ranks", "message"), table(__file__, "parts of ranks", **globals()))
def test_heads_and_channels_that_ranks_cannot_share_are_refused_by_number(part: Any, ranks: int, message: str) -> None:
    with pytest.raises(ExecutorError, match=f"^{message}"):
        state_of(SPEC, part, torch.float32, ranks)


def test_a_rank_has_its_share_of_a_state() -> None:
    assert state_of(SPEC, MAMBA, torch.float32, 4) == (1 + 3, max(16 * 24 * 4, 3 * (2 * 16 + 3 * 24) * 4))
    assert state_of(SPEC, DELTA, torch.float32, 2) == (1 + 2, max(16 * 24 * 4, 3 * (2 * 16 + 2 * 24) * 4))
