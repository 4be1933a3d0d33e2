"""What adapters add to products: the Triton kernels against their twin, and places that adapters come to and go from."""

import pytest
import torch

from penstock.executor.kernels.cuda.adapter_products import add_low_rank
from penstock.executor.kernels.low_rank import AdapterRun, LowRankPart
from penstock.executor.kernels.places import AdapterPlaces
from penstock.executor.kernels.places import add_low_rank as twin
from tests.support.kernel_cases import close, every_dtype
from tests.support.paged import random

SHAPES = [(64, [32]), (200, [48, 20, 20]), (128, [130, 64])]


@every_dtype
@pytest.mark.parametrize(("depth", "widths"), SHAPES, ids=["one part", "three parts", "two parts"])
@pytest.mark.parametrize("rank", [16, 32])
def test_sums_equal_the_twin(
    device: torch.device, dtype: torch.dtype, depth: int, widths: list[int], rank: int
) -> None:
    """Rows of some tiles alone, whole and partly filled; those of no tile stay as they are to the bit."""
    rows, places, width = 40, 3, sum(widths)
    x, y = (random(rows, size, dtype=dtype, seed=size).to(device) for size in (depth, width))
    down = random(places, len(widths), rank, depth, dtype=dtype, seed=2).to(device) / depth**0.5
    up = random(places, width, rank, dtype=dtype, seed=3).to(device) / rank**0.5
    tiles = torch.tensor([[0, 16, 2], [16, 3, 2], [21, 1, 0], [30, 10, 1]], dtype=torch.int32, device=device)
    expected, actual = y.clone(), y.clone()
    twin(x, expected, tiles, down, up, widths)
    add_low_rank(x, actual, tiles, down, up, widths)
    close(actual, expected)
    for none in (slice(19, 21), slice(22, 30)):
        assert torch.equal(actual[none], y[none])
    assert not torch.equal(actual, y)


def test_adapters_share_few_places_and_a_step_gets_all_of_its_own() -> None:
    """As on a device: what a step needs is brought to a place before it runs, whatever was there."""
    shapes, most = [(8, [4, 6]), (10, [5])], 2
    places = AdapterPlaces(shapes, most, 3, torch.float32, torch.device("cpu"))
    adapters = {
        number: [
            [
                LowRankPart(
                    random(3, 6, seed=10 * number + 1), random(3, 8, seed=10 * number), 4
                ),  # changes the second part alone
            ],
            [LowRankPart(random(2, 5, seed=10 * number + 3), random(2, 10, seed=10 * number + 2), 0)],
        ]
        for number in (1, 2, 3, 4)
    }
    x = [random(5, 8, seed=7), random(5, 10, seed=8)]
    for step in ([1, 2], [2, 3], [1, 3], [3], [4, 1], [4, 2]):
        runs = [AdapterRun(2 * index, 2, number) for index, number in enumerate(step)]
        placed = places.runs(runs, {number: adapters[number] for number in step})
        for product, (_, widths) in enumerate(shapes):
            y = torch.zeros(5, sum(widths))
            placed.add(product, x[product], y)
            expected = torch.zeros(5, sum(widths))
            for run in runs:
                rows = slice(run.first, run.first + run.num_rows)
                for up, down, column in adapters[run.adapter][product]:
                    expected[rows, column : column + up.shape[1]] += x[product][rows] @ down.T @ up
            close(y, expected)
    places.forget(4)
    places.forget(3)  # which has no place
    assert sorted([*places._free, *places._at.values()]) == [0, 1]
