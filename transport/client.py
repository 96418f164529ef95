"""A client of a decode node (or, for STATUS alone, of a prefill node).

Decides nothing about jobs: it keeps one session, sends SUBMIT and CANCEL, and hands out what comes back, job
by job. Used by the scripts and the tests. One thread owns a client; it must come back to
`events` more often than the node's lease, because that is where signs of life are sent. A session is never
resumed: when it ends, every live job of it is reported as failed, and the next call opens a new one.
"""

from collections.abc import Iterator
from typing import Any, Self

import zmq

from common.clock import now_ms, pause_ms
from common.endpoints import is_local
from common.errors import ErrorCode, HandshakeRefused, NodeUnavailable, PeerProtocolError
from common.ids import new_incarnation
from common.messages import (
    CacheOrder,
    CacheReply,
    CancelJob,
    ClientError,
    Failed,
    Finished,
    HelloOk,
    Rejected,
    Role,
    StatusReply,
    StatusRequest,
    Submit,
)
from transport.codec import Header, decode, encode
from transport.connector import Connector
from transport.key_files import ClientKeys
from transport.link import DealerLink
from transport.peers import (
    AttemptRefused,
    CloseSocket,
    Delivered,
    LivenessTimes,
    OpenSocket,
    Post,
    RouteLost,
    SendFrame,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Tick,
)
from transport.port import ControlPort
from transport.zmq_sockets import new_context

TIMES = LivenessTimes(ping_ms=500, suspect_ms=1_500, dead_after_ms=3_000, lease_ms=5_000)
CONNECT_TIMEOUT_MS = 5_000
REFUSED_TIMEOUT_MS = 2_000  # a daemon on this machine that is being started binds within it
_TERMINAL = (Finished, Failed, Rejected)


class Client:
    """One client session. Use as a context manager; leaving it cancels what still runs."""

    def __init__(
        self,
        endpoint: str,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        times: LivenessTimes = TIMES,
        refused_timeout_ms: int | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        """Connect. Raises `NodeUnavailable` when nobody answers in time, `HandshakeRefused` when refused.

        refused_timeout_ms: how long to wait while every attempt finds nobody listening, if that is shorter;
        only this machine's own addresses, `ipc://` and loopback, are known to refuse for that reason alone.
        keys: those that a node with keys asks for.
        """
        self.endpoint = endpoint
        self.hello: HelloOk | None = None
        self._connect_timeout_ms = connect_timeout_ms
        self._refused = False
        self._refusal = ""
        self._keys = keys
        self._context = new_context()
        self._times = times
        self._connector = Connector(times, new_incarnation(), Role.CLIENT)
        self._port: ControlPort | None = None
        self._live: set[str] = set()
        self._arrived: list[Any] = []
        self._status: dict[str, Any] | None = None
        self._cache_reply: CacheReply | None = None
        try:
            hasty = refused_timeout_ms is not None and is_local(endpoint)
            self._ensure_open(refused_timeout_ms if hasty else None)
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        label: str,
        *,
        prompt: str | None = None,
        messages: list[dict[str, str]] | None = None,
        prompt_ids: list[int] | None = None,
        sampling: dict[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Send a job; ACCEPTED or REJECTED and the rest come out of `events` under its label.

        A job that no message can hold is REJECTED without being sent. Raises `ValueError` when a job of this
        label is live: the answers to the two could not be told apart.
        """
        self._ensure_open()
        if label in self._live:
            raise ValueError(f"a job named {label!r} is live: wait for its answer or choose another label")
        turns = None if messages is None else tuple(messages)
        ids = None if prompt_ids is None else tuple(prompt_ids)
        job = Submit(label, prompt, turns, ids, sampling or {}, cache_salt)
        problem = problem_of(job)
        if problem is not None:
            self._arrived.append(Rejected(label, ErrorCode.INVALID_REQUEST, problem))
            return
        self._live.add(label)
        self._post(job)

    def cancel(self, label: str) -> None:
        """Take a job back; it still gets its terminal answer."""
        if self.hello is not None:
            self._post(CancelJob(label))

    def events(self, timeout_ms: int | None = None) -> Iterator[Any]:
        """Messages about this client's jobs; waits for the first at most `timeout_ms` (None: for ever)."""
        deadline_ms = None if timeout_ms is None else now_ms() + timeout_ms
        while not self._arrived and self._turn(deadline_ms):
            continue
        arrived, self._arrived = self._arrived, []
        yield from arrived

    def status(self, timeout_ms: int = CONNECT_TIMEOUT_MS) -> dict[str, Any]:
        """The node's STATUS. Raises `NodeUnavailable` when it does not come in time."""
        self._ensure_open()
        self._status = None
        self._post(StatusRequest())
        deadline_ms = now_ms() + timeout_ms
        while self._status is None:
            if (not self._turn(deadline_ms) and self._status is None) or self.hello is None:
                raise NodeUnavailable(f"{self.endpoint} did not answer STATUS within {timeout_ms} ms")
        return self._status

    def order_cache(self, action: str, name: str, timeout_ms: int) -> CacheReply:
        """Have the node save its prefix cache, or load it, under a name in its directory; what came of it.

        Raises `NodeUnavailable` when no answer comes in time.
        """
        self._ensure_open()
        self._cache_reply = None
        self._post(CacheOrder(action, name))
        deadline_ms = now_ms() + timeout_ms
        while self._cache_reply is None:
            if (not self._turn(deadline_ms) and self._cache_reply is None) or self.hello is None:
                raise NodeUnavailable(f"{self.endpoint} did not {action} its cache within {timeout_ms} ms")
        return self._cache_reply

    @property
    def live(self) -> frozenset[str]:
        """Labels of jobs without a terminal answer."""
        return frozenset(self._live)

    def close(self) -> None:
        """Say goodbye, which cancels the jobs that still run, and let go of the socket."""
        self._drive(self._connector.step(StopConnecting("the client is done"), now_ms()))
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure_open(self, refused_timeout_ms: int | None = None) -> None:
        start_ms = now_ms()
        deadline_ms = start_ms + self._connect_timeout_ms
        refused_ms = deadline_ms if refused_timeout_ms is None else start_ms + refused_timeout_ms
        while self.hello is None:
            bound_ms = min(deadline_ms, refused_ms) if self._refused else deadline_ms
            if not self._turn(bound_ms) and self.hello is None and (self._refused or now_ms() >= deadline_ms):
                raise NodeUnavailable(
                    f"nobody answers at {self.endpoint}: is the daemon running (a model may still load),"
                    " and is this the endpoint of its ready line? If that node uses keys, give --key-file and"
                    f" --server-key{self._refusal}"
                )

    def _post(self, message: Any) -> None:
        self._drive(self._connector.step(Post(self.hello.session, message), now_ms()))

    def _turn(self, deadline_ms: int | None) -> bool:
        """Wait for and handle whatever is next; False when it did so after the deadline, without waiting."""
        moment_ms = now_ms()
        last = deadline_ms is not None and moment_ms >= deadline_ms
        bounds = [deadline_ms, self._connector.deadline_ms()]
        if self._port is not None:
            bounds.append(self._port.deadline_ms(moment_ms))
        bound_ms = min((bound for bound in bounds if bound is not None), default=None)
        timeout_ms = None if bound_ms is None else max(0, bound_ms - moment_ms)
        if self._port is None:
            pause_ms(timeout_ms or 0)  # a poller without sockets would not wait
        else:
            poller = zmq.Poller()
            for socket in self._port.link.sockets:
                poller.register(socket, zmq.POLLIN)
            poller.poll(timeout_ms)
        moment_ms = now_ms()
        items = [] if self._port is None else [*self._port.receive(), *self._port.flush(moment_ms)]
        for item in items:
            self._refused = isinstance(item, RouteLost)
            self._drive(self._connector.step(item, moment_ms))
        self._drive(self._connector.step(Tick(), moment_ms))
        return not last

    def _drive(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case OpenSocket(route=route):
                    self._refused = False
                    self._port = ControlPort(
                        DealerLink(self._context, self.endpoint, route, self._keys), self._times.dead_after_ms
                    )
                case CloseSocket() if self._port is not None:
                    self._port.close()
                    self._port = None
                case SendFrame() if self._port is not None:
                    lost = self._port.send(effect, now_ms())
                    if lost is not None:
                        self._drive(self._connector.step(lost, now_ms()))
                case SessionOpened(hello_ok=hello_ok):
                    self.hello = hello_ok
                case SessionEnded(cause=cause):
                    self._lose(cause)
                case AttemptRefused(refusal=refusal):
                    if not refusal.temporary:
                        raise HandshakeRefused(f"{self.endpoint}: {refusal.detail}")
                    self._refusal = f" (it said: {refusal.detail})"
                case Delivered(message=message):
                    self._deliver(message)

    def _deliver(self, message: Any) -> None:
        if isinstance(message, StatusReply):
            self._status = message.body
            return
        if isinstance(message, CacheReply):
            self._cache_reply = message
            return
        if isinstance(message, _TERMINAL):
            self._live.discard(message.label)
        if isinstance(message, ClientError):
            # All that we send is checked, so this is a node that takes no jobs: a prefill node, say.
            for label in sorted(self._live):
                self._arrived.append(Rejected(label, message.code, f"{self.endpoint}: {message.detail}"))
            self._live.clear()
            self._cache_reply = CacheReply(0, 0, "", message.code, message.detail)
        elif hasattr(message, "label"):
            self._arrived.append(message)

    def _lose(self, cause: str) -> None:
        """The session is over: nobody will answer for its jobs any more."""
        self.hello = None
        detail = f"the session with {self.endpoint} ended: {cause}"
        for label in sorted(self._live):
            self._arrived.append(Failed(label, ErrorCode.PEER_LOST, detail, ErrorCode.PEER_LOST.definite))
        self._live.clear()


def problem_of(message: Any) -> str | None:
    """What keeps a message from travelling; asked before it gets a number, as a gap would end the session."""
    try:
        decode(encode(Header("", 1), message))
    except PeerProtocolError as error:
        return error.detail
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None
