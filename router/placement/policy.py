"""The policies by which a replica is chosen, and their weights. csrc/route_choice.c computes them.

The default, `predicted-ttft`, is the seconds until a new request's first token: work queued there that is not cached,
plus the part of its own prompt that is not cached there, over the replica's learned speed, plus what its answers in
flight cost. Everything is in one unit, so a long match cannot outweigh a long queue, nor the other way round.
"""

from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from penstock.engine.options import Count, Delay, Seconds, Share
from penstock.router.config import PolicyName

Speed = Annotated[float, Meta(gt=0)]  # tokens per second
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)  # in this order in C


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: PolicyName = "predicted-ttft"
    wear: Delay = 1.0  # cost of new content beside its time, at a replica with the mean amount of it
    first_tokens_per_s: Speed = 5_000.0  # of prefill, assumed until the speed of a replica is learned
    first_delay_s: Delay = 0.004  # delay of a first token by each answer in flight, until it is learned
    affinity_s: Delay = 0.05  # a session stays where it was unless another replica is better by more
    host_credit: Share = 0.8  # what a token cached in host memory saves, of one on the device
    disk_credit: Share = 0.5
    prediction_s: Seconds = 5.0  # a prediction counts for at most so long
    stall_s: Seconds = 5.0  # a replica whose events are silent for longer is guessed at
    max_sessions: Count = 50_000
    max_facts: Count = 2**22  # entries of the index, 36 bytes each when in use
