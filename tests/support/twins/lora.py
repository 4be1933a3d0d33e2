"""The plain-torch reference of what adapters add to products (executor/kernels/cuda/adapter_products.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_lora(x: Tensor, y: Tensor, tiles: Tensor, down: Tensor, up: Tensor, widths: Sequence[int]) -> None:
    for first, num_rows, place in tiles.tolist():
        rows = slice(first, first + num_rows)
        inner = torch.einsum("td,prd->tpr", x[rows].float(), down[place].float()).to(x.dtype)
        sums = [inner[:, part].float() @ each.float().T for part, each in enumerate(up[place].split(list(widths)))]
        y[rows] = (y[rows].float() + torch.cat(sums, 1)).to(y.dtype)
