"""How a child process lives exactly as long as its parent. It knows nothing else of ours.

`python -m penstock.executor.process_life PARENT COMMAND…` becomes COMMAND, tied to that parent: for those that start a
program from a process with many threads, where no code of ours may run between fork and exec.
"""

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


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the kernel's promise outlives this
