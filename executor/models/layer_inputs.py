"""The end of a Gemma 4 layer: adds the token's per-layer embedding to the residual stream and scales it."""

import torch
from torch import Tensor

from penstock.executor.kernels import Ops
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Weights


class LayerInputs:
    """Computes the per-layer embeddings of all layers from the token ids and the tokens' embeddings."""

    def __init__(self, spec: DecoderSpec, width: int, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps, self._width, self._hidden_size = ops, spec.norm_eps, width, spec.hidden_size
        rows = len(spec.layers) * width
        self._table = weights.tensor("model.embed_tokens_per_layer.weight", (spec.input_vocab_size, rows))
        self._project = weights.linear(spec.hidden_size, Matrix("model.per_layer_model_projection", rows))
        self._norm = weights.norm("model.per_layer_projection_norm.weight", width)

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens [T] and their embeddings [T, hidden] -> [T, layers, width]"""
        projected = (self._project(hidden) * self._hidden_size**-0.5).view(-1, self._width)
        projected = self._ops.rms_norm(projected, self._norm, self._eps)
        looked_up = self._table.index_select(0, tokens).view(-1, self._width) * self._width**0.5
        inputs: Tensor = (projected + looked_up) * 0.5**0.5
        return inputs.view(len(tokens), -1, self._width)


class LayerEnd:
    """The end of one layer: a gated projection of its inputs, if any, and a scale."""

    def __init__(self, spec: DecoderSpec, width: int, prefix: str, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps = ops, spec.norm_eps
        if width:
            self._gate = weights.linear(spec.hidden_size, Matrix(f"{prefix}per_layer_input_gate", width))
            self._project = weights.linear(width, Matrix(f"{prefix}per_layer_projection", spec.hidden_size))
            self._norm = weights.norm(f"{prefix}post_per_layer_input_norm.weight", spec.hidden_size)
        self._scalar = weights.float32(f"{prefix}layer_scalar", (1,)).item()

    def __call__(self, stream: Tensor, inputs: Tensor | None) -> Tensor:
        """stream [T, hidden] and the layer's inputs [T, width] -> [T, hidden]"""
        if inputs is not None:
            opened = self._ops.gate(torch.cat((self._gate(stream), inputs), dim=1), "gelu_tanh")
            stream = stream + self._ops.rms_norm(self._project(opened), self._norm, self._eps)
        return stream * self._scalar
