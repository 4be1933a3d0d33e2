"""gpt-oss: experts alone, every other layer windowed, a sink for each head, biases everywhere; its experts as MXFP4."""

from dataclasses import replace

from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields
from penstock.executor.models.families import pick_layers, spec_of, uniform_layers
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.moe_spec import MoeSpec

_PRODUCTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_KINDS = {"": "weight", "_blocks": "weight", "_bias": "bias"}
ARRANGEMENT = Arrangement(
    joined=tuple(
        (f"experts.{product}{end}", tuple((f"experts.#.{part}.{kind}", 1) for part in parts))
        for product, parts in _PRODUCTS.items()
        for end, kind in _KINDS.items()
    ),
    alternating=("experts.gate_up_proj",),
    turned=("experts.gate_up_proj", "experts.down_proj"),
)


def gpt_oss(fields: Fields) -> DecoderSpec:
    fields.only("swiglu_alpha", 1.702, default=1.702)
    fields.only("swiglu_limit", 7.0, default=7.0)
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_scaling", None, "an object (these models have YaRN)")
    moe = MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        router="router",
        has_router_bias=True,
    )
    if moe.top_k > moe.num_experts:
        raise fields.error("num_experts_per_tok", moe.top_k, f"at most the experts ({moe.num_experts})")
    full = uniform_layers(fields)
    sliding = uniform_layers(fields, fields.integer("sliding_window", 128))
    layers = pick_layers(fields, full, sliding, [index % 2 == 0 for index in range(len(full))])
    has_biases = fields.flag("attention_bias", True)
    spec = spec_of(
        fields,
        tuple(replace(layer, moe=moe) for layer in layers),
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=True,
        has_sinks=True,
        arrangement=ARRANGEMENT,
    )
    return replace(spec, activation="clamped_swish")
