"""Corrects Triton 3.6's interpreter for bfloat16, which it keeps as bare 16-bit integers, for NaN, and for numpy 2.4; and
makes it find what a GPU would not forgive, such as an access beyond the end of a tensor.

Its casts truncate, where GPUs round to the nearest, and its `dot` multiplies the bit patterns. Kernels do no other
arithmetic in bfloat16: the interpreter would get that wrong too. Its `minimum`, `maximum` and `clamp` return NaN where an
operand is NaN, where GPUs return the other operand unless they are told to keep NaN. Bounds of a `range` are arrays of
one element to it, which numpy no longer turns into numbers by itself.
"""

import functools
from collections.abc import Iterator
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
    _check_accesses()
    plain_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
    _spare_time()


def _spare_time() -> None:
    """Leave out what took more than a third of the time. Triton computes each sum again to check it for overflow, and drops
    the result; it builds a table of types for each number; and it patches the language again in each call of a function."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.pointer_type.__hash__ = tl.block_type.__hash__ = lambda self: hash(self.name)
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._patch_lang(tl.standard.sum.fn)  # once, for the language's own functions
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **keywords: self.rewrite()(*args, **keywords)


def _check_accesses() -> None:
    """Let every load and store fail that leaves the tensors of its launch, also where its result would not be used; and
    launches of a number of warps that there is not."""
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store
    plain_atomic = builder.create_atomic_rmw
    plain_arguments, plain_run = grid._init_args_hst, interpreter.InterpretedFunction.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        num_warps = options.get("num_warps", 4)
        assert num_warps in (1, 2, 4, 8, 16, 32), f"{self}: {num_warps} warps, which is no power of two"
        return plain_run(self, *arguments, **options)

    def remember(self: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        result = plain_arguments(self, arguments, keywords)
        interpreter.interpreter_builder.extents = [*_extents(result)]
        return result

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        _check(self, pointers, mask)
        if other is None and pointers.data.size > 1:  # a GPU would leave anything outside of the mask: here NaN, or -1
            dtype = pointers.get_element_ty()
            bits = np.full((*pointers.data.shape, dtype.primitive_bitwidth // 8), 255, np.uint8)
            other = interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(dtype))[..., 0], dtype)
        return plain_load(self, pointers, mask, other, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(self, pointers, mask)
        return plain_store(self, pointers, value, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(self, pointers, mask)
        return plain_atomic(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw = load, store, atomic
    grid._init_args_hst, interpreter.InterpretedFunction.run = remember, run


def _extents(argument: Any) -> Iterator[tuple[int, int]]:
    """Yield the first address and the end of each tensor in the arguments of a launch."""
    if isinstance(argument, torch.Tensor):
        steps = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
        end = argument.data_ptr() + (steps + 1) * argument.itemsize
        yield argument.data_ptr(), end if argument.numel() else argument.data_ptr()
    elif isinstance(argument, dict | list | tuple):
        for part in argument.values() if isinstance(argument, dict) else argument:
            yield from _extents(part)


def _check(builder: Any, pointers: Any, mask: Any) -> None:
    used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
    if used.size:
        first, end = int(used.min()), int(used.max()) + pointers.get_element_ty().primitive_bitwidth // 8
        inside = any(start <= first and end <= stop for start, stop in builder.extents)
        assert inside, f"bytes {first:#x} to {end:#x} are accessed, outside of the tensors of the launch"


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
