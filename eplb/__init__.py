"""Balancing experts over ranks, in numpy: this room plans; the executor counts tokens and moves weights."""

from penstock.eplb.choice import choose
from penstock.eplb.maps import Plan
from penstock.eplb.measure import balance, bound
from penstock.eplb.planner import plan
from penstock.eplb.replanner import replan
from penstock.eplb.split import reweight
from penstock.eplb.tracker import LoadTracker
from penstock.eplb.transfer import transfers

__all__ = ["LoadTracker", "Plan", "balance", "bound", "choose", "plan", "replan", "reweight", "transfers"]
