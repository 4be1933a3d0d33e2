"""The main program of a child process: ties the process to its parent, then imports the child's module and calls its
`main`.

`start_child` (executor/process_life.py) runs it. Importing torch takes seconds, from a slow disk minutes, and a child
must not outlive its parent during that time either. Therefore this file imports only a few small modules.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from importlib import import_module
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def main() -> int:
    name, fd, parent, is_tied = sys.argv[1:]
    if int(is_tied):  # otherwise the kernel would watch only a thread that may end before its process
        die_with(int(parent))
    threading.Thread(target=_leave_with, args=(int(fd),), daemon=True).start()
    sys.argv[1:] = [fd]
    return int(import_module(name).main() or 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call to prctl
        leave()


def _leave_with(fd: int) -> NoReturn:
    """End this process when the parent's end of the channel `fd` closes."""
    poll = select.poll()
    poll.register(fd, 0)  # no events: the kernel always reports the closing of the other end
    poll.poll()
    leave()


def leave() -> NoReturn:
    """Exit immediately: the parent has ended, and the main thread may be blocked forever."""
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
