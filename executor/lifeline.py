"""How a child process lives exactly as long as its parent. It knows nothing else of ours."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    Where that thread may end before its process, or the kernel does not offer this, a pipe that closes must do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
