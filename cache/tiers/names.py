"""The names of the stores and of their tiers."""

DISK, PEER = "disk", "peer"
SERVED = "served"  # the entry of the stores' statistics for blocks served to peers


def peer_name(address: str) -> str:
    """Return the name of the store for the peer at `address`; each peer is a store of its own."""
    return f"{PEER} {address}"


def tier_of(store: str) -> str:
    """Return the tier of a store; all peers belong to one tier."""
    return store.partition(" ")[0]
