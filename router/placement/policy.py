"""By what a replica is chosen: the policies and their weights. csrc/route_choice.c computes them.

The default, `predicted-ttft`, is the seconds until a new request's first token: work queued there that is not cached,
plus the part of its own prompt that is not cached there, over the replica's learned speed, plus what its answers in
flight cost. Everything is in one unit, so a long match cannot outweigh a long queue, nor the other way round.
"""

from typing import get_args

import msgspec

from penstock.router.config import PolicyName

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)  # in this order in C


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: PolicyName = "predicted-ttft"
    wear: float = 0.5  # what new content costs beside its time, where as much of it went as to the mean replica
    decode_s: float = 0.004  # an answer in flight delays a first token by this much
    first_tokens_per_s: float = 5_000.0  # prefill speed of a replica of which nothing is known
    affinity_s: float = 0.05  # a session stays where it was unless another replica is better by more
    host_credit: float = 0.8  # what a token cached in host memory saves, of one on the device
    disk_credit: float = 0.5
    hope_s: float = 5.0  # a prediction counts for at most so long
    stall_s: float = 5.0  # a replica whose events are silent for longer is guessed at
    max_sessions: int = 50_000
    max_facts: int = 2**22  # entries of the index, 36 bytes each when in use

    def check(self) -> "PolicyConfig":
        if self.name not in POLICIES:
            raise ValueError(f"policy: {self.name!r} is not one of {', '.join(POLICIES)}")
        for field in ("first_tokens_per_s", "hope_s", "stall_s", "max_sessions", "max_facts"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: {getattr(self, field)} is not above 0")
        for field in ("decode_s", "affinity_s", "wear"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}: {getattr(self, field)} is below 0")
        for field in ("host_credit", "disk_credit"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}: {getattr(self, field)} is outside 0 … 1")
        return self
