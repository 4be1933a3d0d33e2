"""The two ends of a model, tokens in and logits out, with the vocabulary shared out between the ranks."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from penstock.executor.kernels.linear import Linear, tied
from penstock.executor.models.weights import Weights


class Vocabulary:
    """An embedding [size, width] by `name`, and a head: the same table if `is_tied`, else `lm_head`."""

    def __init__(self, weights: Weights, name: str, size: int, width: int, is_tied: bool) -> None:
        self._group, self._size = weights.group, size
        table = weights.table(f"{name}.weight", (size, width), copy=not is_tied)
        self._first, end = self._group.share(size)
        self._last = end - self._first - 1
        self._head: Linear
        self._rows: Callable[[Tensor], Tensor]
        if is_tied:
            self._head, self._rows = tied(table, weights.ops)
        else:
            self._head = weights.linear(("lm_head",), (size,), width, split="rows")
            self._rows = partial(table.index_select, 0) if isinstance(table, Tensor) else table.rows

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, width]"""
        if self._group.world == 1:
            return self._rows(tokens)
        local = tokens - self._first
        rows = self._rows(local.clamp(0, self._last))
        rows.masked_fill_(((local < 0) | (local > self._last))[:, None], 0)
        return self._group.sum(rows)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, width] -> [S, size] on the first rank, None on the others."""
        return self._group.gather_columns(self._head(hidden), self._size)
