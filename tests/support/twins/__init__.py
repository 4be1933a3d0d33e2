"""Kernels in plain torch that nothing falls back on, which is why they are not in executor/kernels, and sets of operations
of which some are others."""

from types import SimpleNamespace
from typing import TypeVar, cast

from penstock.executor.kernels import BlockOps, InputOps, Ops, SamplingOps

Kind = TypeVar("Kind", Ops, BlockOps, SamplingOps, InputOps)


def operations(kind: type[Kind]) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def changed(kind: type[Kind], ops: Kind, **changes: object) -> Kind:
    return cast(Kind, SimpleNamespace(**{name: getattr(ops, name) for name in operations(kind)} | changes))
