"""How much failing may cost: retries in proportion to requests, so that a sick fleet is not finished off by them."""

RESERVE = 10  # retries that a router may make before it has seen a request


class RetryBudget:
    """A token bucket: every request puts in `share` of a retry, every retry takes one out.

    It holds as much as half of what is in flight: when a replica dies, all its requests are sent again at once, and
    over time the extra load is still bounded by `share`.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.tokens = float(RESERVE)

    def deposit(self, num_in_flight: int) -> None:
        """A request has come; `num_in_flight` requests are there with it."""
        room = num_in_flight / 2
        tokens, room = self.tokens + self.share, room if room > RESERVE else RESERVE
        self.tokens = tokens if tokens < room else room

    def take(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True
