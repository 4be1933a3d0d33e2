"""What the tiers have of a chain, as the tests look at it."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex


class Counts(NamedTuple):
    """Leading blocks of a chain by the nearest tier that has them."""

    device: int
    host: int
    loading: int  # being read into the host
    stores: dict[str, int]


def match(index: TierIndex, keys: Sequence[bytes], device: BlockPool) -> Counts:
    num_device = num_host = num_loading = 0
    stores = dict.fromkeys(index.stores, 0)
    for key in keys:
        if device.find(key):
            num_device += 1
        elif index.host.find(key):
            num_host += 1
        elif index.ticket_of(key) is not None:
            num_loading += 1
        elif (store := index.store_of(key)) is not None:
            stores[store] += 1
        else:
            break
    return Counts(num_device, num_host, num_loading, stores)
