"""Random weights as GGUF files store them, and their values by the gguf package."""

import math

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.executor.code_types import CODE_TYPES
from penstock.executor.kernels.stored_formats import Ggml
from penstock.executor.kernels.weight import Weight

FILE_TYPES = [kind for kind in CODE_TYPES if not kind.startswith("G")]  # the others are made of other formats
HALVES_AT = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": []}
HALVES_AT |= {kind: [0] for kind in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")}


def packed(rng: np.random.Generator, shape: tuple[int, ...], kind: str, deviation: float = 0.0) -> np.ndarray:
    """Random rows of a storage type: any quants and inner scales, scales that stay finite. With a deviation, values are
    about as large."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if block == 1:
        numbers = rng.standard_normal(shape, dtype=np.float32)
        return np.asarray(gguf.quants.quantize(numbers * (deviation or 1), GGMLQuantizationType[kind]))
    blocks = rng.integers(0, 256, (math.prod(shape) // block, size), dtype=np.uint8)
    halves = {at: rng.uniform(-1, 1, len(blocks)) for at in HALVES_AT.get(kind, [0, 2])}
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(0, 140, len(blocks)) if not deviation else 127 + round(math.log2(deviation / 3))

    def scaled(by: float) -> np.ndarray:
        for at, values in halves.items():
            blocks[:, at : at + 2] = (values * by).astype("<f2").view(np.uint8).reshape(-1, 2)
        return blocks.reshape(*shape[:-1], -1)

    rows = scaled(1.0)
    if deviation and halves:
        rows = scaled(deviation / float(gguf.quants.dequantize(rows, GGMLQuantizationType[kind]).std()))
    return rows


def coded(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> tuple[Weight, torch.Tensor]:
    """Return a weight and its values [rows, columns] in float64."""
    rows = packed(rng, shape, kind)
    values = gguf.quants.dequantize(rows, GGMLQuantizationType[kind]).astype(np.float64)
    return Weight(Ggml(CODE_TYPES[kind]), torch.from_numpy(rows), name="a weight"), torch.from_numpy(values)
