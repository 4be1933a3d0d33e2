"""Limits retries to a share of the requests, so that retries do not overload a fleet that is failing."""

RESERVE = 10  # retries that a router may make before it has seen a request


class RetryBudget:
    """A token bucket: every request adds `share` of a token, and every retry takes one.

    It holds at most half as many tokens as requests are in flight: when a replica dies, all its requests can be sent again at
    once, and over time the extra load is still bounded by `share`.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.tokens = float(RESERVE)

    def deposit(self, num_in_flight: int) -> None:
        """Count a new request, which makes `num_in_flight` with the others."""
        room = num_in_flight / 2
        tokens, room = self.tokens + self.share, room if room > RESERVE else RESERVE
        self.tokens = tokens if tokens < room else room

    def take(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True
