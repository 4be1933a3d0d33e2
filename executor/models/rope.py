"""Rotary position embedding (RoPE): reads the settings of a config, and computes the cos and sin tables.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`; both are read.
Scalings that depend on the current length of the sequence are refused, because keys that are already in the cache would
become wrong when the length changes. "longrope" has one set of divisors for short sequences and one for long ones; the
maximum length (`max_model_len`) determines which is used.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.executor.loading.fields import Fields

Tables = dict["Rope", tuple[Tensor, Tensor]]  # cos and sin of each kind of rotation in a model

SUPPORTED = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotation. `dim` dimensions of a head are rotated; the meaning of the fields after `kind` depends on it."""

    dim: int
    theta: float
    kind: Literal["default", "linear", "llama3", "longrope", "proportional", "yarn"] = "default"
    factor: float = 1.0
    original_length: int = 0
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow; proportional: fraction of pairs that are rotated
    high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
    amplitude: float = 1.0  # yarn and longrope multiply cos and sin with it
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # longrope: a divisor for each frequency
    long_divisors: tuple[float, ...] = ()  # longrope: the divisors for sequences beyond the original length

    def for_positions(self, count: int) -> "Rope":
        """Return the rotation for a maximum of `count` positions."""
        chosen = self.long_divisors if count > self.original_length and self.long_divisors else self.divisors
        return replace(self, divisors=chosen, long_divisors=())


def read_rope(fields: Fields, head_dim: int, max_positions: int, partial: float | None = None) -> Rope:
    """Read the rotation of a model in which all layers have the same. `partial` is the default for the rotated part of
    a head; None: the family rotates whole heads."""
    section = rope_section(fields)
    theta = section.number("rope_theta", fields.number("rope_theta", 10000.0))
    section = section.with_defaults(partial_rotary_factor=fields.number("partial_rotary_factor", partial or 1.0))
    name = "original_max_position_embeddings"
    original = fields.integer(name, low=2) if name in fields else None  # wins over the section's
    return rope_of(section, theta, head_dim, max_positions, original, partial is None)


def rope_section(fields: Fields) -> Fields:
    return fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({})


def kind_of(section: Fields) -> str:
    return section.text("rope_type", section.text("type", "default"))


def rope_of(
    section: Fields, theta: float, head_dim: int, max_positions: int, original: int | None = None, is_whole: bool = True
) -> Rope:
    """Return the rotation that a `rope_parameters` or `rope_scaling` object describes."""
    kind = kind_of(section)
    if kind not in SUPPORTED:
        raise section.error("rope_type", kind, f"one of {', '.join(SUPPORTED)}")
    partial = section.number("partial_rotary_factor", 1.0)
    if kind == "proportional":  # pairs are half a head apart, including those that are not rotated
        return Rope(head_dim, theta, "proportional", section.number("factor", 1.0), low=partial)
    dim = int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        raise section.error("partial_rotary_factor", partial, f"an even part of a head's {head_dim} numbers")
    if is_whole and dim != head_dim:
        raise section.error("partial_rotary_factor", partial, "1 (models of this family rotate whole heads)")
    if kind == "default":
        return Rope(dim, theta)
    if kind == "linear":
        return Rope(dim, theta, "linear", section.number("factor"))
    original = original or section.integer("original_max_position_embeddings", max_positions, low=2)
    if kind == "longrope":
        short, long = (section.number_list(f"{name}_factor", dim // 2) for name in ("short", "long"))
        amplitude = section.number("attention_factor", _long_amplitude(section, max_positions, original))
        return Rope(dim, theta, "longrope", 1.0, original, amplitude=amplitude, divisors=short, long_divisors=long)
    factor = section.number("factor")
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise section.error("low_freq_factor", low, f"a number below high_freq_factor ({high})")
        return Rope(dim, theta, "llama3", factor, original, low, high)
    if theta <= 1:
        raise section.error("rope_theta", theta, "a number above 1")
    low, high = section.number("beta_slow", 1.0), section.number("beta_fast", 32.0)
    amplitude = section.number("attention_factor", _yarn_amplitude(section, factor))
    return Rope(dim, theta, "yarn", factor, original, low, high, amplitude, section.flag("truncate", True))


def _long_amplitude(section: Fields, max_positions: int, original: int) -> float:
    factor = section.number("factor", max_positions / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_amplitude(section: Fields, factor: float) -> float:
    if section.has_value("mscale") and section.has_value("mscale_all_dim"):
        return yarn_growth(factor, section.number("mscale")) / yarn_growth(factor, section.number("mscale_all_dim"))
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_tables(rope: Rope, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [num_positions, dim / 2] float32."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * _frequencies(rope)
    return (angles.cos() * rope.amplitude).to(device), (angles.sin() * rope.amplitude).to(device)


def _frequencies(rope: Rope) -> Tensor:
    """Return radians per position [dim / 2], computed on the CPU so that all devices have the same values."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        return plain / rope.factor * (torch.arange(rope.dim // 2) < int(rope.low * rope.dim // 2))
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents)
    if rope.kind == "llama3":
        # Wavelengths much shorter than the original length are kept, longer ones are stretched by `factor`.
        turns = rope.original_length * plain / (2 * math.pi)  # turns of each pair within the original length
        keep = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    else:
        fast, slow = _yarn_dimension(rope, rope.high), _yarn_dimension(rope, rope.low)
        if rope.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, rope.dim - 1)
        ramp = (torch.arange(rope.dim // 2).float() - fast) / (slow - fast if slow != fast else 0.001)
        keep = 1 - ramp.clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn_dimension(rope: Rope, turns: float) -> float:
    """Return the (fractional) index of the pair that turns `turns` times within the original length."""
    return rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
