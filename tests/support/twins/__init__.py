"""Kernels in plain torch that nothing falls back on, which is why they are not in executor/kernels, and sets of operations
of which some are others."""

from typing import TypeVar, cast

from penstock.executor.kernels import BlockOps, InputOps, Ops, SamplingOps

Kind = TypeVar("Kind", Ops, BlockOps, SamplingOps, InputOps)


def operations(kind: object) -> list[str]:
    """Return the names of the operations of one of these Protocols."""
    return [name for name in vars(kind) if not name.startswith("_")]


def changed(ops: Kind, **changes: object) -> Kind:
    return cast(Kind, _Changed(ops, changes))


class _Changed:
    def __init__(self, ops: object, changes: dict[str, object]) -> None:
        self._ops = ops
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)
