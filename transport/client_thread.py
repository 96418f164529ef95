"""A client session of a decode node that lives as long as its process, on a thread of its own.

Decides nothing about jobs: one thread owns the socket, opens session after session, and hands out what
arrives; whoever started it says what to send, from any thread. Used by the gateway, whose own thread must
never wait for a socket. It must never raise what a peer can cause, and nothing that was meant for one session
is ever sent in another.
"""

import threading
import traceback
from collections.abc import Callable
from typing import Any

from common.client_messages import Tokens
from common.clock import pause_ms
from common.ids import new_incarnation
from common.messages import Role
from transport.client import TIMES
from transport.connector import Connector
from transport.key_files import ClientKeys
from transport.link import DealerLink
from transport.loop import Loop, Mailbox, ThreadDied
from transport.peers import (
    AttemptRefused,
    CloseSocket,
    Delivered,
    LivenessTimes,
    OpenSocket,
    Post,
    SendFrame,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Tick,
)
from transport.port import ControlPort
from transport.zmq_sockets import new_context

_STOP_S = 2.0
# Tokens of one decode step come one by one. While several jobs have some, they are let come together, because
# a thread that wakes for each costs several times what the tokens do.
_GATHER_MS = 1
_GATHERED_TURNS = 4
_HANDED_OUT = (SessionOpened, SessionEnded, AttemptRefused)


class ClientThread:
    """One endpoint's session, and its next one.

    `deliver` is called on the thread, with all that one turn brought: SessionOpened, SessionEnded,
    AttemptRefused, Delivered, and as the last one ThreadDied, after which nothing comes any more. It must not
    block.
    """

    def __init__(
        self,
        endpoint: str,
        deliver: Callable[[list[Any]], None],
        keys: ClientKeys | None = None,
        times: LivenessTimes = TIMES,
    ) -> None:
        """keys: those that a node with keys asks for. Nothing happens before `start`."""
        self.endpoint = endpoint
        self._deliver = deliver
        self._keys = keys
        self._times = times
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop.wakeup)
        self._connector = Connector(times, new_incarnation(), Role.CLIENT)
        self._context = new_context()
        self._port: ControlPort | None = None
        self._stopping = False
        self._arrived: list[Any] = []
        self._gathered_turns = 0
        self._thread = threading.Thread(target=self._run, name="decode client", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def post(self, session: str, message: Any) -> None:
        """Send a message in this session; dropped when it has ended, which is or will be delivered.

        Safe from any thread. The message must be one that `transport.client.problem_of` passes.
        """
        self._mailbox.put(Post(session, message))

    def stop(self) -> None:
        """Say goodbye, which cancels the jobs that still run, and let go of the socket; the last call."""
        self._mailbox.put(StopConnecting("the client is done"))
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        try:
            self._live()
        except BaseException:  # whoever waits for answers must learn that none will come
            self._deliver([ThreadDied(traceback.format_exc())])
        finally:
            if self._port is not None:
                self._port.close()
            self._context.term()

    def _live(self) -> None:
        while not self._stopping:
            self._loop.end_turn()
            self._loop.poll(self._deadline_ms())
            if self._gathered_turns:
                self._gathered_turns -= 1
                pause_ms(_GATHER_MS)
            self._turn()

    def _deadline_ms(self) -> int | None:
        bounds = [self._connector.deadline_ms()]
        if self._port is not None:
            bounds.append(self._port.deadline_ms(self._loop.now_ms()))
        return min((bound for bound in bounds if bound is not None), default=None)

    def _turn(self) -> None:
        moment_ms = self._loop.now_ms()
        # Asked for before anything is done with it: what comes of it may close the port.
        items = [] if self._port is None else [*self._port.receive(), *self._port.flush(moment_ms)]
        for item in [*items, *self._mailbox.take(), Tick()]:
            self._stopping = self._stopping or isinstance(item, StopConnecting)
            self._drive(self._connector.step(item, moment_ms))
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._deliver(arrived)
            if _of_several_jobs(arrived):
                self._gathered_turns = _GATHERED_TURNS

    def _drive(self, effects: list[Any]) -> None:
        for effect in effects:
            if type(effect) is Delivered:
                self._arrived.append(effect)
                continue
            match effect:
                case SendFrame() if self._port is not None:
                    lost = self._port.send(effect, self._loop.now_ms())
                    if lost is not None:
                        self._drive(self._connector.step(lost, self._loop.now_ms()))
                case OpenSocket(route=route):
                    link = DealerLink(self._context, self.endpoint, route, self._keys)
                    self._port = ControlPort(link, self._times.dead_after_ms)
                    self._loop.watch(link.sockets)
                case CloseSocket() if self._port is not None:
                    self._loop.forget(self._port.link.sockets)
                    self._port.close()
                    self._port = None
                case _ if isinstance(effect, _HANDED_OUT):
                    self._arrived.append(effect)


def _of_several_jobs(arrived: list[Any]) -> bool:
    labels = {
        item.message.label for item in arrived if type(item) is Delivered and isinstance(item.message, Tokens)
    }
    return len(labels) > 1
