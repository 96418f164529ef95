"""The gateway's listening socket.

Decides how it is bound and what is said when it cannot be. Bound before anything heavy is loaded, so that a
port in use is told at once; connections that come meanwhile wait in its backlog.
"""

import errno
import socket

from common.errors import ConfigError

_BACKLOG = 1_024
_SEND_BUFFER_BYTES = 128 * 1024  # in the kernel, of a client that does not read


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises `ConfigError` that says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}; give an address of this machine") from None
    except OSError as error:
        raise ConfigError(_bind_problem(host, port, error)) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    # asyncio sets it on sockets that name their protocol, which this one does not: 40 ms to a first token.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} at {host} is in use: stop what listens there, or give another --port (0 for any)"
    return f"cannot listen at {host}, port {port}: {error.strerror}; give another --host or --port"
