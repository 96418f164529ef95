"""Gateways that start at once, forked from a process that has imported FastAPI already.

Decides nothing: it is `tests/process/nursery.py` with one more import. Used by `tests.gateway.harness` alone;
that a gateway's usage errors do not wait for those imports is tested in an interpreter of its own.
"""

import atexit
import socket
import subprocess
import sys
from functools import cache

from tests.process.harness import ROOT
from tests.process.nursery import Nursery, main


class _GatewayNursery(Nursery):
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.gateway.nursery", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()


@cache
def gateway_nursery() -> Nursery:
    """Where this test process has its gateways forked."""
    made = _GatewayNursery()
    atexit.register(made.close)
    return made


if __name__ == "__main__":
    import decode_node.gateway.server  # noqa: F401

    main()
