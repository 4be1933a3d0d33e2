"""The gated MLP of a layer, or of one expert. Each rank has some of its columns; the results are still to be summed."""

from collections.abc import Sequence

import torch

from penstock.executor.kernels import Ops
from penstock.executor.kernels.linear import Narrow, Plain, multiply, take_narrow
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Split, Weights


class Mlp:
    """`names` are those of the gate, up and down projections."""

    def __init__(
        self,
        spec: DecoderSpec,
        size: int,
        names: tuple[str, str, str],
        weights: Weights,
        ops: Ops,
        is_split: bool = True,
    ) -> None:
        gate, up, down = names
        rows: Split = "rows" if is_split else None
        columns: Split = "columns" if is_split else None
        self._gate_up = weights.linear((gate, up), (size, size), spec.hidden_size, spec.mlp_bias, split=rows)
        self._down = weights.linear((down,), (spec.hidden_size,), size, spec.mlp_bias, split=columns)
        self._activation, self._gated = spec.activation, ops.gated_linear
        self._activate = ops.silu_mul if spec.activation == "silu" else ops.gelu_tanh_mul
        self._quantize = None if ops.blocks is None or spec.activation != "silu" else ops.blocks.silu_mul_quantize

    def __call__(self, hidden: torch.Tensor | Narrow) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        layer = self._gate_up
        if self._gated is not None and isinstance(layer, Plain) and layer.bias is None:
            return self._down(self._gated(hidden, layer.weight, self._activation))
        gate_up = multiply(layer, hidden)
        if self._quantize is not None and take_narrow(self._down):
            return multiply(self._down, Narrow(self._quantize(gate_up), gate_up.dtype))
        return self._down(self._activate(gate_up))

    @staticmethod
    def each(mlps: "Sequence[Mlp]", counts: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]: the first counts[0] rows through the first of these, the next through the second."""
        gate_ups, downs = [mlp._gate_up for mlp in mlps], [mlp._down for mlp in mlps]
        gate_up = type(gate_ups[0]).each(gate_ups, counts, hidden)
        return type(downs[0]).each(downs, counts, mlps[0]._activate(gate_up))

    @property
    def has_blocks(self) -> bool:
        """Whether all of it computes in eight bits."""
        return take_narrow(self._gate_up, self._down)

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._gate_up)

    def tensors(self) -> list[torch.Tensor]:
        return [*self._gate_up.tensors(), *self._down.tensors()]


def projections(prefix: str) -> tuple[str, str, str]:
    return f"{prefix}gate_proj", f"{prefix}up_proj", f"{prefix}down_proj"
