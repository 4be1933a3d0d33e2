"""What a rank gives to peers: nothing that was dropped, not even if it is only on its way."""

import threading

import numpy as np

from penstock.executor.tiers.served import Served


def test_what_was_dropped_is_given_to_no_peer_until_it_is_there_anew() -> None:
    served = Served(np.zeros((4, 8), np.uint8), {}, threading.Lock(), lambda: None)
    there, coming = served.overwrite(1, b"there"), served.overwrite(2, b"coming")
    served.fill(there)
    served.note_disk([b"there", b"kept"], [])
    served.take_changes()
    served.drop([b"there", b"coming", b"unknown"])
    served.fill(coming)
    assert served.keys() == [b"kept"] and served.take_changes() == ([], [b"there"])
    served.fill(served.overwrite(3, b"there"))
    assert sorted(served.keys()) == [b"kept", b"there"] and served.copy(b"there", memoryview(bytearray(8)))
