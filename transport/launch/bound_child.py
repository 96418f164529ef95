"""Becomes another program that ends with the process which started it.

`python -m transport.launch.bound_child PARENT COMMAND...` asks the kernel for a SIGTERM at the parent's
death, then it is COMMAND. Run by `transport/daemon_process.py` for every daemon, so that a launcher that is
killed leaves nothing running. It must never fork: the request belongs to this very process. It is a program
of its own because code between fork and exec is not safe beside threads. Only Linux can do this; elsewhere
COMMAND just runs.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns; exits with 1 when the parent has died already."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # A parent that died before the request will never be reported.
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
