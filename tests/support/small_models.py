"""Small random models of every supported architecture, made by transformers: the oracle for ours."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OPT_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_SIZES = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

QWEN_NEXT_SIZES = {
    **SIZES,
    "num_hidden_layers": 5,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SHARED = {"shared_expert_intermediate_size": 48}
GEMMA4 = {
    **SIZES,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 160,
    "final_logit_softcapping": 3.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.7 * i for i in range(6)],
}
MINISTRAL_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
GRANITE4 = {
    "layer_types": ["attention"] * 3,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
}
MAMBA = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "rms_norm_eps": 0.01,
}
GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

# case → (transformers' config class, its fields beside the sizes)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES}),
    # Wide enough for a kernel to be tempted to sum a single row in another order than many (oneDNN is, above 1024).
    "llama-wide": ("LlamaConfig", {**SIZES, "intermediate_size": 1536}),
    "llama-tied-biases": (
        "LlamaConfig",
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama-rope-llama3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("LlamaConfig", {**SIZES, "rope_parameters": YARN_ROPE}),
    "llama-rope-linear": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {**SIZES, "sliding_window": 11}),
    "qwen2": ("Qwen2Config", {**SIZES}),
    "qwen2-sliding": (
        "Qwen2Config",
        {**SIZES, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **SIZES,
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "rope_parameters": GEMMA_ROPE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **SIZES,
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True},
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": None,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **SIZES,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": YARN_ROPE | {"truncate": False, "rope_theta": 150000.0},
            "_attn_implementation": "eager",
        },
    ),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-sliding": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**SIZES, **EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        {**DEEPSEEK_SIZES, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2-biases": (
        "DeepseekV2Config",
        {
            **DEEPSEEK_SIZES,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
        },
    ),
    "deepseek-v2-yarn": (
        "DeepseekV2Config",
        {**DEEPSEEK_SIZES, "topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek-v3": ("DeepseekV3Config", {**DEEPSEEK_SIZES}),
    "phi3": ("Phi3Config", {**SIZES, "sliding_window": 17}),
    "phi3-longrope": (
        "Phi3Config",
        {**SIZES, "rope_parameters": LONG_ROPE, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 2},
    ),
    "olmo2": ("Olmo2Config", {**SIZES}),
    "olmo3": (
        "Olmo3Config",
        {**SIZES, "sliding_window": 9, "num_hidden_layers": 5, "rope_scaling": {**YARN_ROPE, "attention_factor": 1.2}},
    ),
    "smollm3": ("SmolLM3Config", {**SIZES, "num_hidden_layers": 5}),
    "smollm3-sliding": (
        "SmolLM3Config",
        {**SIZES, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 11},
    ),
    "granite": ("GraniteConfig", {**SIZES, **MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    "granite-moe": ("GraniteMoeConfig", {**SIZES, **MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**SIZES, **MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
    ),
    "granite4-moe": ("GraniteMoeHybridConfig", {**SIZES, **MULTIPLIERS, **GRANITE4, "num_local_experts": 4}),
    "granite4-dense": (
        "GraniteMoeHybridConfig",
        {**SIZES, **MULTIPLIERS, **GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "ministral": (
        "MinistralConfig",
        {
            **SIZES,
            "head_dim": 24,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("Ministral3Config", {**SIZES, "head_dim": 24, "rope_parameters": MINISTRAL_ROPE}),
    "seed-oss": ("SeedOssConfig", {**SIZES, "head_dim": 24}),
    "ernie4.5": ("Ernie4_5Config", {**SIZES, "head_dim": 24, "use_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 2,
        },
    ),
    "ernie4.5-plain": ("Ernie4_5Config", {**SIZES, "head_dim": 24}),
    "glm4": ("Glm4Config", {**SIZES, "head_dim": 24}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {**SIZES, **GLM_EXPERTS, "head_dim": 24, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        {**DEEPSEEK_SIZES, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {**SIZES, "head_dim": 24, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            **SIZES,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "opt": ("OPTConfig", {**OPT_SIZES}),
    "opt-norm-after-projected": (
        "OPTConfig",
        {**OPT_SIZES, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
    ),
}

# Models with recurrent layers.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextConfig", {**QWEN_NEXT_SIZES, **EXPERTS, **SHARED, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5TextConfig", {**QWEN_NEXT_SIZES, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**QWEN_NEXT_SIZES, **EXPERTS, **SHARED}),
    "lfm2": (
        "Lfm2Config",
        {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "conv_bias": True},
    ),
    "granite4-mamba": (
        "GraniteMoeHybridConfig",
        {**SIZES, **MULTIPLIERS, **GRANITE4, **MAMBA, "num_local_experts": 4, "position_embedding_type": "nope"},
    ),
    "granite4-mamba-groups": (
        "GraniteMoeHybridConfig",
        {
            **SIZES,
            **MULTIPLIERS,
            **GRANITE4,
            **MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
}


@cache
def reference(case: str) -> Any:
    return random_model(*(CASES | RECURRENT)[case])


def random_model(name: str, fields: dict[str, Any]) -> Any:
    """The model, float32; biases and norms are random too, so that none can be forgotten unnoticed."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, name)(**deepcopy(fields))  # which writes into the dictionaries it is given
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model.eval()


def randomize(model: Any) -> None:
    for parameter in model.parameters():
        spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data += spread * torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # learned, though transformers keeps it as a buffer
            buffer += 0.3 * torch.randn(buffer.shape)
        elif name.endswith("layer_scalar"):
            buffer -= 0.2


@cache
def _root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="penstock-models-")  # removed when the interpreter ends


@cache
def folder(case: str) -> Path:
    path = Path(_root().name) / case
    reference(case).save_pretrained(path)
    return path


@torch.no_grad()
def greedy(case: str, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """What transformers generates: the tokens, and the logits [count, vocabulary] they come from."""
    out = reference(case).generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)
