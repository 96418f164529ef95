"""Bulk sockets: messages whose last frames are KV, sent from where it lies.

Decides how KV frames leave a slot without a copy and when their memory is let go of; called by the wiring of
both nodes, on the loop thread. Which piece may leave or is obeyed is the word of `transport.bulk`. It never
blocks. A slot must never be written while a piece of it is not let go of: ZeroMQ reads it when it likes.
"""

import ctypes
from collections import deque
from collections.abc import Iterator
from functools import cache

import zmq

from common import limits
from common.errors import ErrorCode
from common.kv_layout import KvLayout
from common.messages import KvPiece
from transport.bulk import BULK_ROUTE, PieceLetGo
from transport.codec import Header, encode
from transport.key_files import ClientKeys, ServerKeys
from transport.landing import part_bytes
from transport.peers import BadFrame, FrameReceived, RouteLost, SendFrame
from transport.port import read_frames
from transport.zmq_sockets import bind_bulk_router, connect_bulk_dealer

_HEAD_FRAMES = 3

# Plain numbers: an operation on pyzmq's flags costs as much as the rest of sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# Of malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


class BulkSource:
    """The prefill node's end: a ROUTER for one session, with a port of its own."""

    def __init__(self, context: zmq.Context, host: str, first_port: int, keys: ServerKeys | None) -> None:
        """Bind to a free port of `host`, see `bind_bulk_router`. Raises `ConfigError` when that cannot be."""
        self.socket, self.port = bind_bulk_router(context, host, first_port, keys)
        self.sockets = [self.socket]
        self._outbox: deque[tuple[SendFrame, list[memoryview]]] = deque()
        self._reading: deque[tuple[zmq.MessageTracker, PieceLetGo]] = deque()

    def send(self, frame: SendFrame, parts: list[memoryview]) -> list[PieceLetGo | RouteLost]:
        """Send a piece or keep it for `flush`; the route, if it is gone."""
        self._outbox.append((frame, parts))
        return self._send_waiting()

    def flush(self) -> list[PieceLetGo | RouteLost]:
        """Try what waits; name what was let go of, and a route that is gone."""
        return [*self._send_waiting(), *self._let_go()]

    def deadline_ms(self, now_ms: int) -> int | None:
        """When `flush` should be called again."""
        return now_ms + limits.LET_GO_RETRY_MS if self._outbox or self._reading else None

    def receive(self) -> Iterator[FrameReceived | BadFrame]:
        """Credit and the first message, one batch of them."""
        for _ in range(limits.RECEIVE_BATCH_MESSAGES):
            received = _receive_frames(self.socket, limits.MESSAGE_FRAMES)
            if not received:
                return
            route, *frames = [frame.bytes for frame in received]
            yield read_frames(route, frames)

    def close(self) -> None:
        """Drop what was not sent. `flush` still tells when the last of it is not read any more."""
        self._outbox.clear()
        self.socket.close(linger=0)

    @property
    def quiet(self) -> bool:
        """Whether nothing reads the slots any more."""
        return not self._reading and not self._outbox

    def _send_waiting(self) -> list[RouteLost]:
        while self._outbox:
            frame, parts = self._outbox[0]
            head = encode(Header(frame.session, frame.sequence), frame.message)
            try:
                # What refuses a message refuses it here, at its first frame.
                self.socket.send(frame.route, _MORE)
            except zmq.Again:
                return []
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return [RouteLost(frame.route)]
            for part in head:
                self.socket.send(part, _MORE)
            tracker = self._send_parts(parts)
            self._outbox.popleft()
            self._reading.append((tracker, PieceLetGo(frame.message.slot, frame.message.epoch)))
        return []

    def _send_parts(self, parts: list[memoryview]) -> zmq.MessageTracker:
        """What tells when the last of them is let go of: a closed socket drops them in no order."""
        send, last = self.socket.send, len(parts) - 1
        trackers = [
            send(part, _MORE if number < last else _NOBLOCK, copy=False, track=True)
            for number, part in enumerate(parts)
        ]
        return zmq.MessageTracker(*trackers)

    def _let_go(self) -> list[PieceLetGo]:
        done = []
        while self._reading and self._reading[0][0].done:
            done.append(self._reading.popleft()[1])
        return done


class BulkSink:
    """The decode node's end: a DEALER for one session. `parts`: the KV frames of the piece just received."""

    def __init__(
        self, context: zmq.Context, endpoint: str, layout: KvLayout, keys: ClientKeys | None
    ) -> None:
        _keep_freed_memory()
        self.parts: list[memoryview] = []
        self._layout = layout
        self.socket, self._monitor = connect_bulk_dealer(context, endpoint, keys)
        self.sockets = [self.socket, self._monitor]

    def send(self, frame: SendFrame) -> bool:
        """Send the first message or a credit; False when the socket takes no more: the session is lost."""
        frames = encode(Header(frame.session, frame.sequence), frame.message)
        try:
            self.socket.send_multipart(frames, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[FrameReceived | BadFrame | RouteLost]:
        """Pieces that have arrived, a few at a time; `parts` holds until the next one."""
        # Asked for first: what was sent before the end has arrived by then.
        lost = self._monitor.poll(0)
        for _ in range(limits.KV_BATCH_MESSAGES):
            frames = _receive_frames(self.socket, _HEAD_FRAMES + 2 * self._layout.layers)
            if not frames:
                if lost:
                    yield RouteLost(BULK_ROUTE)
                return
            self.parts = [frame.buffer for frame in frames[_HEAD_FRAMES:]]
            yield self._read(frames)
            self.parts = []

    def _read(self, frames: list[zmq.Frame]) -> FrameReceived | BadFrame:
        read = read_frames(BULK_ROUTE, [frame.bytes for frame in frames[:_HEAD_FRAMES]])
        if isinstance(read, BadFrame) or not isinstance(read.message, KvPiece) or self._fit(read.message):
            return read
        detail = "the frames of a piece of KV are not as it says"
        return BadFrame(read.route, read.session, read.sequence, ErrorCode.BAD_MESSAGE, detail)

    def _fit(self, piece: KvPiece) -> bool:
        """Whether the frames are what the piece says."""
        size_bytes = part_bytes(piece, self._layout)
        sized = all(part.nbytes == size_bytes for part in self.parts)
        return sized and len(self.parts) == 2 * piece.layer_count and size_bytes > 0

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


@cache
def _keep_freed_memory() -> None:
    """Have the C library keep, in this process, as much freed memory as KV on its way may need.

    ZeroMQ allocates every frame anew. By its defaults glibc gives such memory back to the kernel and asks for
    it again, page by page: of 377 MB a third came as page faults, and took a quarter of the time (measured).
    Where there is no such call nothing is lost but that.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option in (_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD):
            set_option(option, 2 * limits.KV_CREDIT_BYTES)


def _receive_frames(socket: zmq.Socket, most: int) -> list[zmq.Frame]:
    """The frames of one message, without a copy, one more than `most` at the most; none when there is none.

    What came of the message before may have closed the socket.
    """
    if socket.closed:
        return []
    try:
        frames = [socket.recv(_NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while frames[-1].more:
        frame = socket.recv(_NOBLOCK, copy=False)
        if len(frames) > most:
            frames[-1] = frame  # too many already: the rest is thrown away unread
        else:
            frames.append(frame)
    return frames
