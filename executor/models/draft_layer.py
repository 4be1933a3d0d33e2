"""Multi-token prediction: a model's own layer that drafts the token after the next one.

At position p the layer reads the model's hidden state and the embedding of the token at p + 1. Its result, in the model's
head, predicts the token at p + 2. It is one more layer, with keys and values in the same pages, so blocks are shared,
saved and evicted with its part. What it stores at the last position of a block depends on the token after the block,
which another request with the same block may not have. Its drafts may then be worse, but no draft changes an answer.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from penstock.executor.kernels import Ops
from penstock.executor.loading.fields import Fields
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Weights
from penstock.executor.protocol import ExecutorError

# Tokens that may be drafted. Tokenizers number common pieces of text first: the first half of SmolLM2's 49,152 tokens are 95 %
# of this repository's text. A small model reads a third of its weights for the head; each draft would do so again.
DRAFT_VOCABULARY = 65_536

# Qwen's names of the tensors → ours, which are DeepSeek's, after the prefix of the layer behind the model's last one.
_RENAMES = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}


def with_draft_layer(spec: DecoderSpec, fields: Fields, names: Collection[str] | None) -> DecoderSpec:
    """Add the model's draft layer, of several the first, to its spec; raise ExecutorError if the model has none. `names` are
    those of the stored tensors, None with random weights."""
    attends = [layer for layer in spec.layers if layer.recurrent is None]
    counts = [fields.integer(name, 0, low=0) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")]
    is_stored = names is None or any("mtp.fc." in name or ".eh_proj." in name for name in names)
    if not attends or not any(counts) or not is_stored:
        raise ExecutorError(
            "speculative_config: the method 'mtp' was given, and the model has no layer for multi-token prediction"
        )
    prefix = f"model.layers.{len(spec.layers)}."
    renames = tuple((old, prefix + new) for old, new in _RENAMES.items())
    stored = spec.arrangement
    ignored = tuple(name for name in stored.ignored if name != "mtp.")
    arrangement = replace(stored, renames=(*stored.renames, *renames), ignored=ignored)
    return replace(spec, layers=(*spec.layers, attends[-1]), arrangement=arrangement, has_draft_layer=True)


class DraftInputs:
    """Joins the states of the model with the embeddings of the next tokens: the input of the draft layer."""

    def __init__(self, spec: DecoderSpec, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps, size = ops, spec.norm_eps, spec.hidden_size
        prefix = f"model.layers.{len(spec.layers) - 1}."
        names = "enorm", "hnorm", "shared_head.norm"
        norms = (weights.norm(f"{prefix}{name}.weight", size, spec.norm_offset) for name in names)
        self._embedding_norm, self._state_norm, self.output_norm = norms
        self._project = weights.linear(2 * size, Matrix(f"{prefix}eh_proj", size))

    def __call__(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[T, hidden] twice -> [T, hidden]"""
        embeddings = self._ops.rms_norm(embeddings, self._embedding_norm, self._eps)
        return self._project(torch.cat((embeddings, self._ops.rms_norm(states, self._state_norm, self._eps)), dim=1))
