"""Which addresses Tandem takes, as text alone.

Decides what a well-formed endpoint is and where a daemon may bind. Called by the configuration and by whoever
takes an endpoint from a person. It must never touch the network or the file system: whether an address is in
use shows at the bind.
"""

import ipaddress
import re

from common.limits import IPC_PATH_BYTES

PORT_MAX = 65_535

_TCP = re.compile(r"tcp://(?P<host>[A-Za-z0-9_.*-]+):(?P<port>[0-9]{1,5})")


def check_bind_endpoint(endpoint: str, has_keys: bool = False) -> str:
    """Return `endpoint` if a daemon, with keys or without, may bind it. Raises ValueError.

    Port 0 lets the system choose.
    """
    check_bind_form(endpoint)
    if not has_keys and not is_local(endpoint):
        raise ValueError(
            f"{endpoint!r}: binding to a non-loopback address is refused without keys; make them with "
            "'python scripts/keys.py make NAME' and give --key-file and --allowed-keys; or use 127.0.0.1, "
            "ipc://PATH or an SSH tunnel"
        )
    return endpoint


def check_bind_form(endpoint: str) -> str:
    """Return `endpoint` if it is well-formed, whoever may bind it. Raises ValueError."""
    if endpoint.startswith("ipc://"):
        return _check_ipc(endpoint)
    _tcp_parts(endpoint)
    return endpoint


def check_connect_endpoint(endpoint: str) -> str:
    """Return `endpoint` if a node or client may connect to it. Raises ValueError."""
    if endpoint.startswith("ipc://"):
        return _check_ipc(endpoint)
    host, port = _tcp_parts(endpoint)
    if "*" in host:
        raise ValueError(f"{endpoint!r}: cannot connect to '*'; name the other node's host")
    if port == 0:
        raise ValueError(
            f"{endpoint!r}: cannot connect to port 0; use the port of the other node's ready line"
        )
    return endpoint


def is_local(endpoint: str) -> bool:
    """Whether a well-formed endpoint can only be one of this machine's own."""
    return endpoint.startswith("ipc://") or _is_loopback(_tcp_parts(endpoint)[0])


def bulk_host(bind: str) -> str:
    """Where a prefill node that binds there binds the sockets of its KV."""
    return "127.0.0.1" if bind.startswith("ipc://") else _tcp_parts(bind)[0]


def bulk_endpoint(worker: str, port: int) -> str:
    """Where a decode node connects for KV: the host that it reached the prefill node at."""
    host = "127.0.0.1" if worker.startswith("ipc://") else _tcp_parts(worker)[0]
    return f"tcp://{host}:{port}"


def _tcp_parts(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None or int(match["port"]) > PORT_MAX:
        raise ValueError(
            f"{endpoint!r} is not an endpoint; use tcp://HOST:PORT (a name or IPv4 address, "
            f"a port up to {PORT_MAX}) or ipc://PATH"
        )
    return match["host"], int(match["port"])


def _check_ipc(endpoint: str) -> str:
    path = endpoint.removeprefix("ipc://")
    if not path or path[0] in "*@" or not path.isprintable():
        raise ValueError(
            f"{endpoint!r}: ipc:// takes the path of a socket file, as in ipc:///run/tandem/decode"
        )
    if len(path.encode()) > IPC_PATH_BYTES:
        raise ValueError(
            f"{endpoint!r}: the path has {len(path.encode())} bytes; a socket path holds {IPC_PATH_BYTES} "
            "at most; use a shorter one"
        )
    return endpoint


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
