"""The only place that makes ZeroMQ sockets, with every option set on purpose.

Decides socket types and options, and takes the lock that keeps two daemons off one `ipc://` path. Called by
the links alone. One context per process; it must not be used from a forked child.
"""

import fcntl
import os
from pathlib import Path

import zmq

from common import limits
from common.errors import ConfigError
from transport.key_files import ClientKeys, ServerKeys, check_private

_BYE_LINGER_MS = 200
_NEVER_MS = 24 * 3_600_000
# ZAP 1.0: where libzmq asks who may connect. The domain tells it that somebody must answer.
_GATE_ENDPOINT = "inproc://zeromq.zap.01"
KEY_DOMAIN = b"tandem"
_CONNECTION_LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def new_context() -> zmq.Context:
    """The process's context: one I/O thread is enough for control traffic."""
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 2 * limits.SESSIONS + 64)
    return context


def _set_common_options(socket: zmq.Socket) -> None:
    # A BYE may still leave after close; nothing else holds up the exit.
    socket.setsockopt(zmq.LINGER, _BYE_LINGER_MS)
    # Beyond these the sender sees EAGAIN and its outbox decides.
    socket.setsockopt(zmq.SNDHWM, limits.HIGH_WATER_MARK_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, limits.HIGH_WATER_MARK_MESSAGES)
    # The socket refuses what the codec would refuse, before it is in memory.
    socket.setsockopt(zmq.MAXMSGSIZE, limits.CONTROL_MESSAGE_BYTES)
    # Liveness is ours (PING, lease); ZeroMQ's would hide a hung node behind its I/O thread.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)


def bind_gate(context: zmq.Context) -> zmq.Socket:
    """The REP that is asked whom to let in; to be bound before any socket with keys."""
    socket = context.socket(zmq.REP)
    _set_common_options(socket)
    socket.bind(_GATE_ENDPOINT)
    return socket


def watch_failures(socket: zmq.Socket) -> zmq.Socket:
    """A monitor of handshakes that failed before anybody was asked.

    It must be read again and again: ZeroMQ's thread waits when some thousand events are unread.
    """
    return socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )


def bind_router(
    context: zmq.Context, endpoint: str, keys: ServerKeys | None = None
) -> tuple[zmq.Socket, "IpcLock | None"]:
    """A bound ROUTER and, for `ipc://`, the lock on its path.

    Raises `ConfigError` when it is in use, or when nothing would keep others out.
    """
    path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None
    if path is not None and keys is None and Path(path).parent.is_dir():
        check_private(Path(path).parent, f"without keys, whoever reaches {endpoint} can use this node")
    lock = None if path is None else IpcLock(path)
    socket = context.socket(zmq.ROUTER)
    _set_common_options(socket)
    _set_server_keys(socket, keys)
    # What a peer sends faster than it is read must not fill our memory.
    socket.setsockopt(zmq.RCVHWM, limits.UNREAD_MESSAGES)
    # An unroutable message is an error to us, not a silent drop.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # Routing ids are the ROUTER's own; nobody can take over another peer's.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if lock is not None:
            lock.release()
        raise ConfigError(_bind_problem(endpoint, error)) from error
    return socket, lock


def connect_dealer(
    context: zmq.Context,
    endpoint: str,
    keys: ClientKeys | None = None,
    unread_messages: int = limits.HIGH_WATER_MARK_MESSAGES,
) -> tuple[zmq.Socket, zmq.Socket]:
    """A DEALER for one session or one attempt at it, which never reconnects by itself, and its monitor.

    The monitor becomes readable when the connection is refused or breaks.
    """
    socket = context.socket(zmq.DEALER)
    _set_common_options(socket)
    socket.setsockopt(zmq.RCVHWM, unread_messages)
    # A disconnect ends the session; a new one opens a new socket with our own back-off. Not -1, which says
    # the same: libzmq then throws away what had arrived unread (16 of 100 last words lost, measured).
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    # HELLO waits in the socket while it connects; it dies with the socket.
    socket.setsockopt(zmq.IMMEDIATE, 0)
    _set_client_keys(socket, keys)
    # Before connect: a refusal may come at once.
    monitor = socket.get_monitor_socket(_CONNECTION_LOST)
    socket.connect(endpoint)
    return socket, monitor


def bind_bulk_router(
    context: zmq.Context, host: str, first_port: int, keys: ServerKeys | None
) -> tuple[zmq.Socket, int]:
    """A ROUTER for the KV of one session on a free port of `host`, and that port.

    first_port: the ports that may be used begin there; 0 for any. Raises `ConfigError` when none is free.
    """
    socket = context.socket(zmq.ROUTER)
    _set_common_options(socket)
    _set_server_keys(socket, keys)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, limits.UNREAD_MESSAGES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    ports = [first_port + offset for offset in range(limits.DECODE_SESSIONS)] if first_port else [0]
    problem = ""
    for port in ports:
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            problem = problem or error.strerror
            continue
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    socket.close(linger=0)
    raise ConfigError(f"no port for KV can be bound on {host}, from {first_port} on: {problem}")


def connect_bulk_dealer(
    context: zmq.Context, endpoint: str, keys: ClientKeys | None
) -> tuple[zmq.Socket, zmq.Socket]:
    """The other end, which never reconnects, and its monitor; see `connect_dealer`."""
    return connect_dealer(context, endpoint, keys, limits.KV_UNREAD_MESSAGES)


def _set_server_keys(socket: zmq.Socket, keys: ServerKeys | None) -> None:
    if keys is None:
        return
    # CURVE alone: a peer without keys fails in the handshake.
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, KEY_DOMAIN)
    # Without a gate nobody gets in, instead of everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _set_client_keys(socket: zmq.Socket, keys: ClientKeys | None) -> None:
    if keys is None:
        return
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)


def _bind_problem(endpoint: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"{endpoint} is in use: stop the daemon that holds it or choose another --bind (port 0 picks one)"
        )
    return f"cannot bind {endpoint}: {error.strerror}"


class IpcLock:
    """Exclusive right to bind one `ipc://` path, held by flock on `PATH.lock`.

    A second bind on a live path would silently take its traffic, so the lock comes first; whoever gets it may
    remove a socket file that a killed daemon left behind.
    """

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` when a live daemon holds the path, when its directory cannot be written, or
        when the path names something else than a socket."""
        self._socket_path = Path(path)
        self._lock_path = Path(f"{path}.lock")
        while True:
            try:
                self._descriptor = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(
                    f"cannot bind ipc://{path}: {error.strerror} ({self._lock_path})"
                ) from error
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._descriptor)
                raise ConfigError(
                    f"ipc://{path} is in use: stop the daemon that holds it or choose another --bind"
                ) from error
            if os.fstat(self._descriptor).st_nlink > 0:
                break
            os.close(self._descriptor)  # its former holder removed it between our open and our lock
        if self._socket_path.exists() and not self._socket_path.is_socket():
            self._let_go()
            raise ConfigError(f"cannot bind ipc://{path}: something of that name exists and is no socket")
        self._socket_path.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the socket file and the lock."""
        self._socket_path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)
