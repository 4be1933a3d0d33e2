"""The layout of DeepSeek's checkpoints: weights in eight bits, with a scale for each block of 128 × 128."""

from typing import Any

import torch

from tests.support.small_models import DEEPSEEK_SIZES, SIZES

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # A rank of two has 64 rows of keys and 192 of a gate: half blocks.
    "qwen3": ("Qwen3Config", {**SIZES, **WIDE, "head_dim": 64}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **DEEPSEEK_SIZES,
            **WIDE,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
        },
    ),
}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight bits [N, K], and by what each block of 128 × 128 is to be multiplied."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    by_value = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * by_value[: values.shape[0], : values.shape[1]]
