"""Loads, plans and options that cannot be used are refused by the field, the value and the limit."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from penstock import eplb
from penstock.eplb.load import MAX_SLOTS
from penstock.eplb.maps import WHOLE
from tests.support.refusals import table

LOAD, PLACEMENT = np.ones((1, 4)), [[0, 1, 2, 3, 0, 1]]
NAMES = {name: getattr(eplb, name) for name in eplb.__all__} | {"LOAD": LOAD, "PLACEMENT": PLACEMENT}
NAMES |= {"OLD": eplb.plan(np.ones((3, 16)), 24, 4), "MAX_SLOTS": MAX_SLOTS, "WHOLE": WHOLE}


@pytest.mark.parametrize(("call", "words"), table(__file__, "calls", np=np, partial=partial, **NAMES))
def test_arguments_that_cannot_be_used_are_refused(call: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        call()
    assert [word for word in words if word not in str(refusal.value)] == [], refusal.value
