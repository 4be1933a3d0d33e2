"""Balancing experts over ranks, in numpy: this room plans; the executor counts tokens and moves weights."""

from penstock.eplb.maps import Plan
from penstock.eplb.measure import balance, bound
from penstock.eplb.planner import plan

__all__ = ["Plan", "balance", "bound", "plan"]
