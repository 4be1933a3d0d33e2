"""Corrects Triton 3.6's interpreter for bfloat16, which it keeps as bare 16-bit integers, for NaN, and for numpy 2.4.

Its casts truncate, where GPUs round to the nearest, and its `dot` multiplies the bit patterns. Kernels do no other
arithmetic in bfloat16: the interpreter would get that wrong too. Its `minimum`, `maximum` and `clamp` return NaN where an
operand is NaN, where GPUs return the other operand unless they are told to keep NaN. Bounds of a `range` are arrays of
one element to it, which numpy no longer turns into numbers by itself.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {
    tl.float32: (torch.float32, np.uint32),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}


def mend() -> None:
    interpreter._convert_float = _convert
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), acc, *options)

    interpreter.InterpreterBuilder.create_dot = create_dot
    for name, function in (("create_minnumf", np.fmin), ("create_maxnumf", np.fmax)):
        setattr(interpreter.InterpreterBuilder, name, _binary(function))
    interpreter.InterpreterBuilder.create_clampf = _clamp
    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


def _binary(function: np.ufunc) -> Any:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, function)


def _clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    is_kept = propagate_nan == tl.PropagateNan.ALL
    return self.ternary_op(x, low, high, np.clip if is_kept else lambda x, low, high: np.fmin(np.fmax(x, low), high))


def _convert(array: np.ndarray, source: Any, goal: Any, rounding: Any) -> np.ndarray:
    (from_dtype, from_bits), (to_dtype, to_bits) = TORCH[source], TORCH[goal]
    bits = torch.from_numpy(np.ascontiguousarray(array).view(from_bits).copy())
    return bits.view(from_dtype).to(to_dtype).view(getattr(torch, to_bits.__name__)).numpy().reshape(array.shape)


def widened(handle: Any) -> Any:
    if handle.dtype.scalar not in (tl.bfloat16, tl.float8e4nv):
        return handle
    return interpreter.TensorHandle(
        _convert(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32), tl.float32
    )
