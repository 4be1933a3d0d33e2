"""How a mixture of experts is made, in numbers: what models are built from and kernels route by."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    renormalize: bool  # a token's shares sum to one, before `scale`
    renormalize_eps: float = 0.0
    scale: float = 1.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    has_bias: bool = False  # added to the scores for the choice alone
    has_router_bias: bool = False  # of the logits: it changes both
    shared_size: int = 0  # of an expert that every token goes through
    shared_name: str = "shared_experts"
    has_shared_gate: bool = False
    is_beside: bool = False  # beside the dense MLP, not in its place; then the router reads the residual stream
    block: str = "mlp"  # the layer's name for all this
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def names(self, prefix: str) -> tuple[str, str, str]:
        gate, up, down = self.projections
        return f"{prefix}{gate}", f"{prefix}{up}", f"{prefix}{down}"
