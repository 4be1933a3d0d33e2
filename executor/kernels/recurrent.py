"""What layers ask for that carry a state along: a short convolution, and the gated delta rule, or Mamba 2."""

from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages

MAX_TAPS = 8
MAX_HEAD = 256  # numbers of a key or a value head at most


class DeltaHeads(NamedTuple):
    """The sizes and the weights, float32, of one layer's heads. Value heads share key heads as grouped queries do keys."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rate: Tensor  # [value heads]: of the decay, below zero
    shift: Tensor  # [value heads]
    norm: Tensor | None  # [value dim]; None of Mamba 2, whose norm is over several heads
    eps: float
    skip: Tensor | None = None  # [value heads]: of Mamba 2, which erases nothing

    @property
    def erases(self) -> bool:
        return self.skip is None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


class DeltaInputs(NamedTuple):
    """Of T tokens; parts of merged products, whose rows lie apart."""

    qkv: Tensor  # [T, 2 keys + values], out of the convolution
    z: Tensor  # [T, values]
    gates: Tensor  # [T, 2 value heads]: b, then a; of Mamba 2 a alone


class RecurrentOps(Protocol):
    """Each row begins where the state says that it reads from, and leaves its state where the batch says (`StateBatch`).
    Unit 0 of a layer has the last inputs of its convolution, those after it one head's S each."""

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: StatePages, batch: ForwardBatch, has_silu: bool
    ) -> Tensor:
        """Each channel's last inputs by its weights: x [T, C], weight [taps, C] and bias [C] float32 -> [T, C]. Kept are
        the last taps - 1 inputs, in the dtype of x."""

    def delta_rule(self, inputs: DeltaInputs, heads: DeltaHeads, states: StatePages, batch: ForwardBatch) -> Tensor:
        """The gated delta rule -> [T, values]: with q and k of length one, q by key_dim^-1/2 as well,

        S = e^(rate softplus(a + shift)) S, S = S + k (sigmoid(b) (v - k S)), rms_norm(q S) * silu(z)

        where S [key_dim, value_dim] is float32. Mamba 2, with q and k as they are:

        S = e^(rate softplus(a + shift)) S + k (softplus(a + shift) v), (q S + skip v) * silu(z)"""
