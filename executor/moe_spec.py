"""The parameters of a mixture-of-experts (MoE) block, which models are built from and kernels route by."""

from typing import Literal, NamedTuple

PROJECTIONS = "gate_proj", "up_proj", "down_proj"  # of most MLPs: gate, up, down


class MoeSpec(NamedTuple):
    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    renormalize: bool  # the weights of a token's experts sum to one, before `scale`
    renormalize_eps: float = 0.0
    scale: float = 1.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # experts are chosen from the best `top_groups` of these groups
    top_groups: int = 1
    has_bias: bool = False  # a bias added to the scores only for choosing experts, not for their weights
    has_router_bias: bool = False  # a bias of the router logits, which affects choice and weights
    shared_size: int = 0  # intermediate size of the shared expert, which computes every token; 0: none
    shared_name: str = "shared_experts"
    has_shared_gate: bool = False
    latent_size: int = 0  # if set, the experts compute in this many dimensions, between two projections
    is_beside: bool = False  # in addition to the dense MLP; the router then reads the residual stream
    block: str = "mlp"  # the name of the block in the layer
    router: str = "gate"
    projections: tuple[str, str, str] = PROJECTIONS
