"""The MLP of a layer or of one expert. Each rank computes some of its columns; the caller sums the results."""

from collections.abc import Sequence

from torch import Tensor

from penstock.executor.batch import AdaptedRows
from penstock.executor.kernels import UNGATED, Fp8Rows, NormedRows, Ops, Rows
from penstock.executor.kernels.linear import Linear, multiply_each
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Split, Weights
from penstock.executor.moe_spec import PROJECTIONS


class Mlp:
    """A gated MLP, or one with an activation alone between its projections (`UNGATED`). `projections` are the names of
    its gate, up and down projections, after `prefix`."""

    def __init__(
        self,
        spec: DecoderSpec,
        size: int,
        prefix: str,
        weights: Weights,
        ops: Ops,
        projections: tuple[str, str, str] = PROJECTIONS,
        is_split: bool = True,
    ) -> None:
        rows: Split = "rows" if is_split else None
        columns: Split = "columns" if is_split else None
        hidden, has_bias = spec.hidden_size, spec.mlp_bias
        self.is_gated = spec.activation not in UNGATED
        names = projections[:2] if self.is_gated else projections[1:2]
        self.gate_up = weights.linear(hidden, *(Matrix(prefix + name, size, rows, has_bias=has_bias) for name in names))
        self.down = weights.linear(size, Matrix(prefix + projections[2], hidden, columns, has_bias=has_bias))
        self._activation, self._ops = spec.activation, ops
        self.takes_fp8 = self.gate_up.takes_fp8
        self.takes_normed = self.gate_up.takes_normed and self.gate_up.bias is None
        self._quantize = None if ops.blocks is None or spec.activation != "silu" else ops.blocks.silu_mul_quantize

    def __call__(self, hidden: Rows, adapters: AdaptedRows | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        layer = self.gate_up
        if adapters is not None:
            assert isinstance(hidden, Tensor)
            adapters.add(layer.number, hidden, gate_up := layer(hidden))
            activated = self._activate(gate_up)
            adapters.add(self.down.number, activated, out := self.down(activated))
            return out
        takes_gate = layer.plain is not None or isinstance(hidden, NormedRows)
        if self.is_gated and layer.bias is None and takes_gate:
            assert not isinstance(hidden, Fp8Rows)
            return self.down(self._ops.gated_linear(hidden, layer.weights[0], self._activation))
        gate_up = layer(hidden)
        if self._quantize is not None and self.down.takes_fp8 and len(gate_up) > self._ops.max_plain_rows:
            return self.down(Fp8Rows(self._quantize(gate_up), gate_up.dtype))
        return self.down(self._activate(gate_up))

    def _activate(self, gate_up: Tensor) -> Tensor:
        """[T, 2 size] or, without a gate, [T, size], which is overwritten -> [T, size]"""
        if self.is_gated:
            return self._ops.gate(gate_up, self._activation)
        up = gate_up.relu_()
        return up.square_() if self._activation == "relu2" else up

    @staticmethod
    def each(mlps: "Sequence[Mlp]", counts: Sequence[int], hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]: mlps[0] on the first counts[0] rows, mlps[1] on the next counts[1], and so on."""
        activated = mlps[0]._activate(multiply_each([mlp.gate_up for mlp in mlps], counts, hidden))
        return multiply_each([mlp.down for mlp in mlps], counts, activated)

    def adapted(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def tensors(self) -> list[Tensor]:
        return [*self.gate_up.tensors(), *self.down.tensors()]
