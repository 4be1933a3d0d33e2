"""A router's choice of experts where logits tie or are NaN, and the order of its entries, against a stable sort."""

import pytest
import torch

from penstock.executor.kernels.cuda import routing
from penstock.executor.moe_spec import MoeSpec
from tests.support.kernel_cases import close, matrix

QWEN3 = MoeSpec(128, 8, 768, renormalize=True)
V2 = MoeSpec(160, 6, 1536, renormalize=False, scale=16.0, num_groups=8, top_groups=3)


def test_of_equal_experts_the_first_is_chosen(device: torch.device) -> None:
    ids, shares = routing.choose_experts(torch.zeros(2, 128, device=device), None, QWEN3)
    assert ids.dtype is torch.int32 and ids.tolist() == [list(range(8))] * 2
    close(shares, torch.full((2, 8), 1 / 8))


def test_logits_that_are_no_numbers_choose_experts_that_there_are(device: torch.device) -> None:
    logits = torch.full((3, 160), torch.nan, device=device)
    ids, _ = routing.choose_experts(logits, None, V2)
    assert ((ids >= 0) & (ids < 160)).all()


@matrix(
    "entries, first, num_slots", (0, 1, 32, 33, 200), (0, 5), (7, 20), hardest=[(0, 0, 20), (33, 0, 20), (200, 5, 7)]
)
def test_entries_lie_by_slot_and_in_their_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, entries: int, first: int, num_slots: int
) -> None:
    """In one chunk of 32, and in several; in four parts of a chunk; in more tiles than a program compares at once."""
    monkeypatch.setattr(routing, "CHUNK_ENTRIES", 32)
    monkeypatch.setattr(routing, "CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(routing, "PAIRS", 8 * 32)
    slots = torch.randint(20, (entries, 1), generator=torch.Generator().manual_seed(entries))
    slots[: entries // 3] = 6  # a favourite
    for dtype in (torch.int32, torch.int64):
        sorted_by = routing.sort_entries(slots.to(device, dtype), num_slots, first, 16)
        expected = [
            (slot - first, part.tolist())
            for slot in range(first, first + num_slots)
            for part in (slots[:, 0] == slot).nonzero()[:, 0].split(16)
            if len(part)
        ]
        ids, tiles = sorted_by.ids.view(-1, 16).tolist(), sorted_by.tiles.tolist()
        assert [(slot, own[:rows]) for (slot, rows), own in zip(tiles, ids, strict=True) if rows] == expected
        assert all(rows == 0 for _, rows in tiles[len(expected) :])
