"""The retry budget: limits retries to a share of the requests, so that they do not overload a failing fleet."""

RESERVE = 10  # retries that are allowed before the first request


class RetryBudget:
    """A token bucket: every request adds `share` tokens, every retry takes one.

    Its capacity is half of the requests in flight: when a replica dies, all its requests are retried at once, and over
    time the extra load is still limited to `share`.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.tokens = float(RESERVE)

    def deposit(self, num_in_flight: int) -> None:
        """Add the tokens of a new request; `num_in_flight` counts the requests in flight, including this one."""
        room = num_in_flight / 2
        tokens, room = self.tokens + self.share, room if room > RESERVE else RESERVE
        self.tokens = tokens if tokens < room else room

    def take(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True
