"""Expert-parallel load balancing (EPLB) in numpy: computes plans; the executor counts tokens and moves weights."""

from penstock.eplb.load import LoadTracker
from penstock.eplb.maps import Plan, balance, choose
from penstock.eplb.planner import bound, plan
from penstock.eplb.replanner import replan
from penstock.eplb.split import reweight
from penstock.eplb.transfer import transfers

__all__ = ["LoadTracker", "Plan", "balance", "bound", "choose", "plan", "replan", "reweight", "transfers"]
