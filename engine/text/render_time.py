"""Limits the time that a chat template may take.

The code that Jinja generates calls `tick` in every loop iteration and every macro call (template_environment.py), so that
the thread that renders ends the rendering itself: threads cannot be ended from outside.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from penstock.engine.sampling_params import InvalidRequest

RENDER_S = 10.0  # for one conversation; the longest contexts take a tenth of a second
TRIAL_S = 0.05  # on the event loop, before the rendering is started again in a thread


class RenderTimeout(InvalidRequest):
    """Raised when a rendering exceeds its limit."""


class _Limit(threading.local):
    seconds = ends_s = float("inf")


_limit = _Limit()


def tick() -> None:
    """Raise RenderTimeout if the rendering of this thread has exceeded its limit."""
    if time.monotonic() > _limit.ends_s:
        what = f"the model's chat template takes longer than {_limit.seconds:g} s to render them, which is the limit"
        raise RenderTimeout("messages", what)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit the renderings of this thread within the context, unless it is within such a context already."""
    if _limit.ends_s != float("inf"):
        yield
        return
    _limit.seconds, _limit.ends_s = seconds, time.monotonic() + seconds
    try:
        yield
    finally:
        _limit.ends_s = float("inf")
