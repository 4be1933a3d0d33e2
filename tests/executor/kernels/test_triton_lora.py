"""What adapters add to products: the Triton kernels against their twin, and places that adapters come to and go from."""

import numpy as np
import torch

from penstock.executor.kernels.cuda.adapter_products import add_lora
from penstock.executor.kernels.lora import LoraPart, LoraSlots
from tests.support.kernel_cases import TOLERANCE, close, matrix
from tests.support.paged import random
from tests.support.twins.lora import add_lora as twin

SHAPES = [(64, [32]), (200, [48, 20, 20]), (128, [130, 64])]
HARDEST = [(torch.bfloat16, SHAPES[1], 32), (torch.float32, SHAPES[2], 16)]


@matrix("dtype, shape, rank", TOLERANCE, SHAPES, (16, 32), hardest=HARDEST)
def test_sums_equal_the_twin(device: torch.device, dtype: torch.dtype, shape: tuple[int, list[int]], rank: int) -> None:
    """Rows of some tiles alone, whole and partly filled, a tile without rows; rows of no tile stay as they are to the bit."""
    depth, widths = shape
    rows, places, width = 40, 3, sum(widths)
    x, y = (random(rows, size, dtype=dtype, seed=size).to(device) for size in (depth, width))
    down = random(places, len(widths), rank, depth, dtype=dtype, seed=2).to(device) / depth**0.5
    up = random(places, width, rank, dtype=dtype, seed=3).to(device) / rank**0.5
    tiles = torch.tensor([[0, 16, 2], [16, 3, 2], [21, 1, 0], [30, 10, 1], [0, 0, 0]], dtype=torch.int32, device=device)
    expected, actual = y.clone(), y.clone()
    twin(x, expected, tiles, down, up, widths)
    add_lora(x, actual, tiles, down, up, widths)
    close(actual, expected)
    for none in (slice(19, 21), slice(22, 30)):
        assert torch.equal(actual[none], y[none])
    assert not torch.equal(actual, y)


def test_adapters_share_few_places_and_a_step_gets_all_of_its_own() -> None:
    """As on a device: what a step needs is brought to a place before it runs, whatever was there."""
    shapes, most = [(8, [4, 6]), (10, [5])], 2
    places = LoraSlots(shapes, most, 3, torch.float32, torch.device("cpu"))
    adapters = {
        number: [
            [
                LoraPart(
                    random(3, 6, seed=10 * number + 1), random(3, 8, seed=10 * number), 4
                ),  # changes the second part alone
            ],
            [LoraPart(random(2, 5, seed=10 * number + 3), random(2, 10, seed=10 * number + 2), 0)],
        ]
        for number in (1, 2, 3, 4)
    }
    for number, products in adapters.items():
        places.hold(number, products)
    x = [random(5, 8, seed=7), random(5, 10, seed=8)]
    for step in ([1, 2], [2, 3], [1, 3], [3], [4, 1], [4, 2]):
        placed = places.runs(np.repeat(step, 2))
        for product, (_, widths) in enumerate(shapes):
            y = torch.zeros(5, sum(widths))
            placed.add(product, x[product], y)
            expected = torch.zeros(5, sum(widths))
            for index, number in enumerate(step):
                rows = slice(2 * index, 2 * index + 2)
                for up, down, column in adapters[number][product]:
                    expected[rows, column : column + up.shape[1]] += x[product][rows] @ down.T @ up
            close(y, expected)
    places.forget(4)
    places.forget(3)  # which has no place
    assert sorted([*places._free, *places._at.values()]) == [0, 1]
