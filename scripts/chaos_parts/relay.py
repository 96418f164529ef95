"""The wire between the nodes: a relay that hands everything on, and mangles what it is told to.

Decides what becomes of each message: the decode node connects to the relay's TCP port, the relay to the
prefill node's socket, one connection for one. An act waits for the next message of its type (a little while,
then for any of a session), and is done once. The relay runs on a thread of its own and never blocks on a
peer. It must hand on unchanged whatever no act is meant for, and a connection that ends on one side ends on
the other.
"""

import selectors
import socket
import struct
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from chaos_parts.schedule import WireAct
from chaos_parts.wire import Piece, Splitter, join
from common.clock import now_ms
from common.errors import PeerProtocolError
from transport.codec import decode

_TURN_MS = 5
_IDLE_MS = 100
_PATIENCE_MS = 1_000
_RECEIVE_BYTES = 65_536
_KEPT_MESSAGES = 32
_OUTGOING_BYTES_MAX = 2**22
# Acts that found no message must not pile up and hit every attempt at a new session.
_FORGET_MS = 2_500
# Never altered: a HELLO that says something else but still makes sense would be obeyed.
_HANDSHAKE = frozenset({"Hello", "HelloOk", "HelloRefused"})
_ALTERING = frozenset({"flip a byte", "shorten a message"})


@dataclass(eq=False, slots=True)
class _Pipe:
    """One direction of a connection. until_ms: held back, or swallowed, so long."""

    source: socket.socket
    sink: socket.socket
    to_prefill: bool
    splitter: Splitter = field(default_factory=Splitter)
    outgoing: bytearray = field(default_factory=bytearray)
    held: list[bytes] = field(default_factory=list)
    hold_until_ms: int = 0
    swallow_until_ms: int = 0
    swapped: bytes | None = None
    history: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))


class Relay(threading.Thread):
    """Listens at `endpoint`. counts: acts done, by kind; connections: how many there were."""

    def __init__(self, prefill_path: str) -> None:
        super().__init__(name="relay", daemon=True)
        self.counts: Counter[str] = Counter()
        self.connections = 0
        self.fault = ""
        self._prefill_path = prefill_path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._pipes: dict[socket.socket, _Pipe] = {}
        self._foreign: dict[bool, deque[bytes]] = {way: deque(maxlen=_KEPT_MESSAGES) for way in (True, False)}
        self._armed: deque[tuple[WireAct, int]] = deque()
        self._leave = threading.Event()

    def arm(self, act: WireAct) -> None:
        """Have an act done to what comes next. Any thread."""
        self._armed.append((act, now_ms()))

    def disarm(self) -> None:
        """From now on hand on everything."""
        self._armed.clear()

    def leave(self) -> None:
        """End the thread and every connection."""
        self._leave.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """The thread's work."""
        try:
            while not self._leave.is_set():
                waiting = any(pipe.held or pipe.outgoing for pipe in self._pipes.values())
                for key, _ in self._selector.select((_TURN_MS if waiting else _IDLE_MS) / 1_000):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._pipes:
                        self._read(self._pipes[key.fileobj])
                for pipe in list(self._pipes.values()):
                    self._flush(pipe)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            for pipe in list(self._pipes.values()):
                self._close(pipe)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        decode_side, _ = self._listener.accept()
        prefill_side = socket.socket(socket.AF_UNIX)
        try:
            prefill_side.connect(self._prefill_path)
        except OSError:
            prefill_side.close()
            decode_side.close()
            return
        decode_side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        for source, sink, to_prefill in (
            (decode_side, prefill_side, True),
            (prefill_side, decode_side, False),
        ):
            source.setblocking(False)
            self._pipes[source] = _Pipe(source, sink, to_prefill)
            self._selector.register(source, selectors.EVENT_READ)

    def _close(self, pipe: _Pipe, reset: bool = False) -> None:
        for end in (pipe.source, pipe.sink):
            ended = self._pipes.pop(end, None)
            if ended is None:
                continue
            self._foreign[ended.to_prefill].extend(ended.history)
            self._selector.unregister(end)
            if reset and end.family == socket.AF_INET:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    def _read(self, pipe: _Pipe) -> None:
        try:
            data = pipe.source.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drain_and_close(pipe)
            return
        for piece in pipe.splitter.feed(data):
            if pipe.source in self._pipes:
                self._hand_on(pipe, piece)

    def _drain_and_close(self, pipe: _Pipe) -> None:
        """Last words go out before the end does."""
        pipe.hold_until_ms = 0
        self._flush(pipe)
        self._close(pipe)

    def _hand_on(self, pipe: _Pipe, piece: Piece) -> None:
        if piece.frames is None:
            pipe.held.append(piece.data)
            return
        name = _type_name(piece.frames)
        act = self._act_for(pipe, name)
        if act is not None:
            self.counts[act.kind] += 1
        if now_ms() < pipe.swallow_until_ms:
            return
        if act is None:
            pipe.held.append(piece.data)
        else:
            self._mangle(pipe, piece, act)
        pipe.history.append(piece.data)
        if pipe.swapped is not None and pipe.swapped is not piece.data:
            pipe.held.append(pipe.swapped)
            pipe.swapped = None

    def _act_for(self, pipe: _Pipe, name: str) -> WireAct | None:
        for item in list(self._armed):
            act, armed_ms = item
            waited_ms = now_ms() - armed_ms
            if waited_ms > _FORGET_MS:
                self._armed.remove(item)
                continue
            fits = act.message == name or (waited_ms > _PATIENCE_MS and name not in _HANDSHAKE)
            if act.to_prefill is not pipe.to_prefill or not fits:
                continue
            if act.kind in _ALTERING and name in _HANDSHAKE:
                continue
            self._armed.remove(item)
            return act
        return None

    def _mangle(self, pipe: _Pipe, piece: Piece, act: WireAct) -> None:
        random = Random(act.seed)
        match act.kind:
            case "drop a message":
                return
            case "repeat a message":
                pipe.held += [piece.data, piece.data]
            case "swap two messages":
                pipe.swapped = piece.data
            case "flip a byte":
                pipe.held.append(join(_flipped(piece.frames, random)))
            case "shorten a message":
                frames = list(piece.frames)
                frames[-1] = frames[-1][: random.randrange(len(frames[-1]))] if frames[-1] else b"\x81"
                pipe.held.append(join(frames))
            case "replay an old message":
                pipe.held += [piece.data, random.choice([piece.data, *pipe.history])]
            case "replay a foreign message":
                pipe.held += [piece.data, random.choice([piece.data, *self._foreign[pipe.to_prefill]])]
            case "insert garbage":
                pipe.held += [piece.data, random.randbytes(random.randint(1, 200))]
            case "cut inside a message":
                pipe.held.append(piece.data[: random.randrange(len(piece.data))])
                self._drain_and_close(pipe)
            case "close" | "reset":
                self._close(pipe, reset=act.kind == "reset")
            case "delay":
                pipe.held.append(piece.data)
                pipe.hold_until_ms = now_ms() + act.hold_ms
            case "swallow":
                pipe.swallow_until_ms = now_ms() + act.hold_ms

    def _flush(self, pipe: _Pipe) -> None:
        if pipe.source not in self._pipes:
            return
        if now_ms() >= pipe.hold_until_ms:
            pipe.outgoing += b"".join(pipe.held)
            pipe.held.clear()
        try:
            while pipe.outgoing:
                del pipe.outgoing[: pipe.sink.send(pipe.outgoing)]
        except BlockingIOError:
            if len(pipe.outgoing) > _OUTGOING_BYTES_MAX:
                self._close(pipe)
        except OSError:
            self._close(pipe)


def _flipped(frames: list[bytes], random: Random) -> list[bytes]:
    """The frames with one byte changed, anywhere."""
    changed = list(frames)
    index = random.choice([index for index, frame in enumerate(frames) if frame])
    frame = bytearray(changed[index])
    frame[random.randrange(len(frame))] ^= random.randint(1, 255)
    changed[index] = bytes(frame)
    return changed


def _type_name(frames: list[bytes]) -> str:
    """Name of the message's type; empty for what is no message."""
    try:
        return type(decode(frames)[1]).__name__
    except PeerProtocolError:
        return ""
