"""The slots of a device that adapters share: each step gets its own adapters, whichever were there before."""

import numpy as np
import torch

from penstock.executor.kernels.lora import LoraPart, LoraSlots
from tests.support.kernel_cases import close
from tests.support.paged import random


def test_adapters_share_few_slots_and_a_step_gets_all_of_its_own() -> None:
    """The adapters that a step needs are copied to slots before it runs, whatever was there."""
    shapes, most = [(8, [4, 6]), (10, [5])], 2
    slots = LoraSlots(shapes, most, 3, torch.float32, torch.device("cpu"))
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
        slots.hold(number, products)
    x = [random(5, 8, seed=7), random(5, 10, seed=8)]
    for step in ([1, 2], [2, 3], [1, 3], [3], [4, 1], [4, 2]):
        runs = slots.runs(np.repeat(step, 2))
        for product, (_, widths) in enumerate(shapes):
            y = torch.zeros(5, sum(widths))
            runs.add(product, x[product], y)
            expected = torch.zeros(5, sum(widths))
            for index, number in enumerate(step):
                rows = slice(2 * index, 2 * index + 2)
                for up, down, column in adapters[number][product]:
                    expected[rows, column : column + up.shape[1]] += x[product][rows] @ down.T @ up
            close(y, expected)
    slots.forget(4)
    slots.forget(3)  # which has no slot
    assert sorted([*slots._free, *slots._at.values()]) == [0, 1]
