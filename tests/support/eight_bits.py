"""The layout of DeepSeek's checkpoints: weights in eight bits, with a scale for each block of 128 × 128."""

import json
from pathlib import Path
from typing import Any

import torch

_DATA = json.loads(Path(__file__).with_name("packed_models.json").read_text())
QUANTIZATION: dict[str, Any] = _DATA["quantization"]["blocks"]


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight bits [N, K] and the scale of each block of 128 × 128."""
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
