"""The bulk side of a session: which piece of KV may leave, and which one is obeyed. For the tcp data plane.

Decides the order of pieces, what credit allows, and that nothing but the next piece of a wanted production
is landed. `BulkSender` is stepped by the prefill node's stack, `BulkReceiver` by the decode node's; both are
pure and run unchanged in simulation. They must never see a byte of KV: they name pieces, the wiring moves
them.
Rules: docs/protocol.md, "Bulk socket".
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import limits
from common.errors import ErrorCode
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import BulkOpen, Credit, KvPiece
from transport.peers import BadFrame, EndSession, FrameReceived, RouteLost, SendFrame, Tick

BULK_ROUTE = b"bulk"
"""The decode node's only route on a bulk socket."""


@dataclass(frozen=True, slots=True)
class FromBulk:
    """Something from the bulk socket of a session: FrameReceived, BadFrame, RouteLost or PieceLetGo."""

    session: str
    item: Any


@dataclass(frozen=True, slots=True)
class ToBulk:
    """Something for the bulk socket of a session: SendFrame, Land or CloseBulk."""

    session: str
    item: Any


@dataclass(frozen=True, slots=True)
class ChunkOffered:
    """Positions `[start, end)` of (slot, epoch) are computed and may be sent."""

    session: str
    slot: int
    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SendsDropped:
    """Nothing more of (slot, epoch) is wanted; what is on its way still reads the slot."""

    session: str
    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PieceLetGo:
    """The memory of one sent piece of (slot, epoch) is not read any more."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PiecesMoved:
    """Pieces of (slot, epoch) leave or arrive. Said now and then: a slow way must not be taken for none."""

    session: str
    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ChunksLetGo:
    """All of the `chunks` that were offered of (slot, epoch) so far have left, or were dropped."""

    session: str
    slot: int
    epoch: int
    chunks: int


@dataclass(frozen=True, slots=True)
class ExpectChunks:
    """A PREFILL went out: positions `[start, end)` will arrive for (slot, epoch)."""

    slot: int
    epoch: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ForgetChunks:
    """What still arrives for (slot, epoch) is thrown away."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Land:
    """Copy the piece that has just arrived to its place."""

    piece: KvPiece


@dataclass(frozen=True, slots=True)
class CloseBulk:
    """The session is over: close its bulk socket; nothing that it held is sent any more."""


@dataclass(frozen=True, slots=True)
class ChunksLanded:
    """Every chunk of (slot, epoch) lies in its landing buffer, unverified."""

    session: str
    slot: int
    epoch: int


def piece_bytes(piece: KvPiece, layout: KvLayout) -> int:
    """Bytes of KV that a piece carries."""
    return 2 * piece.layer_count * (piece.end - piece.start) * layout.row_bytes


def pieces_of(slot: int, epoch: int, start: int, end: int, layout: KvLayout) -> Iterator[KvPiece]:
    """A chunk in pieces of at most `KV_PIECE_BYTES`, but never less than a token of a layer."""
    token_bytes = 2 * layout.row_bytes
    tokens = max(1, min(end - start, limits.KV_PIECE_BYTES // token_bytes))
    layers = max(1, limits.KV_PIECE_BYTES // (tokens * token_bytes)) if tokens == end - start else 1
    for layer in range(0, layout.layers, layers):
        count = min(layers, layout.layers - layer)
        for first in range(start, end, tokens):
            yield KvPiece(slot, epoch, first, min(first + tokens, end), layer, count)


@dataclass(slots=True)
class _Production:
    """Chunks offered so far, and pieces that still read the slot or wait to."""

    chunks: int = 0
    waiting: int = 0
    in_flight: int = 0


class BulkSender:
    """One session's pieces on the prefill node.

    A decode node that takes nothing for `give_up_ms`, though pieces wait or are on their way, loses its
    session.
    """

    def __init__(self, session: str, layout: KvLayout, give_up_ms: int) -> None:
        self.session = session
        self._layout = layout
        self._give_up_ms = give_up_ms
        self._route: bytes | None = None
        self._sent = 0
        self._received = 0
        self._credit_bytes = 0
        self._full_credit_bytes = 0
        self._waiting: deque[KvPiece] = deque()
        self._productions: dict[tuple[int, int], _Production] = {}
        self._moved_ms = 0
        self._told_ms = 0
        self.stale_messages = 0
        self._handlers = {
            ChunkOffered: self._on_offered,
            SendsDropped: self._on_dropped,
            PieceLetGo: self._on_let_go,
            FrameReceived: self._on_frame,
            BadFrame: self._on_bad_frame,
            RouteLost: self._on_route_lost,
            Tick: self._on_tick,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: SendFrame (of a KvPiece), PiecesMoved, ChunksLetGo, EndSession."""
        return self._handlers[type(event)](event, now_ms)

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        owed = self._waiting or self._credit_bytes < self._full_credit_bytes
        return self._moved_ms + self._give_up_ms if owed else None

    def _on_offered(self, event: ChunkOffered, now_ms: int) -> list[Any]:
        production = self._productions.setdefault((event.slot, event.epoch), _Production())
        production.chunks += 1
        if not self._waiting:
            self._moved_ms = now_ms
        for piece in pieces_of(event.slot, event.epoch, event.start, event.end, self._layout):
            production.waiting += 1
            self._waiting.append(piece)
        return self._send(now_ms)

    def _on_dropped(self, event: SendsDropped, now_ms: int) -> list[Any]:
        production = self._productions.get((event.slot, event.epoch))
        if production is None:
            return []
        production.waiting = 0
        self._waiting = deque(
            piece for piece in self._waiting if (piece.slot, piece.epoch) != (event.slot, event.epoch)
        )
        return self._when_quiet(event.slot, event.epoch)

    def _on_let_go(self, event: PieceLetGo, now_ms: int) -> list[Any]:
        self._productions[event.slot, event.epoch].in_flight -= 1
        moved = []
        if now_ms - self._told_ms >= limits.KV_MOVED_MS:
            self._told_ms = now_ms
            moved = [PiecesMoved(self.session, event.slot, event.epoch)]
        return moved + self._when_quiet(event.slot, event.epoch)

    def _when_quiet(self, slot: int, epoch: int) -> list[Any]:
        """The word to the core, once nothing of the production is to be sent or still on its way."""
        production = self._productions[slot, epoch]
        if production.waiting or production.in_flight:
            return []
        for earlier in [key for key in self._productions if key[0] == slot and key[1] < epoch]:
            del self._productions[earlier]
        return [ChunksLetGo(self.session, slot, epoch, production.chunks)]

    def _on_frame(self, event: FrameReceived, now_ms: int) -> list[Any]:
        message = event.message
        stranger = event.session != self.session or self._route not in (None, event.route)
        if stranger or not isinstance(message, (BulkOpen, Credit)):
            self.stale_messages += 1
            return []
        opens = isinstance(message, BulkOpen)
        if event.sequence != self._received + 1 or opens != (self._route is None):
            return self._end(f"{ErrorCode.SEQUENCE_ERROR} on the bulk socket: message {event.sequence}")
        self._received += 1
        self._moved_ms = now_ms
        if opens:
            self._route = event.route
            self._credit_bytes = self._full_credit_bytes = message.credit_bytes
            return self._send(now_ms)
        self._credit_bytes += message.byte_count
        if self._credit_bytes > self._full_credit_bytes:
            return self._end(f"{ErrorCode.PROTOCOL_ERROR}: more credit than was ever used")
        return self._send(now_ms)

    def _on_bad_frame(self, event: BadFrame, now_ms: int) -> list[Any]:
        if event.route != self._route:
            self.stale_messages += 1
            return []
        return self._end(f"{ErrorCode.PROTOCOL_ERROR} on the bulk socket: {event.detail}")

    def _on_route_lost(self, event: RouteLost, now_ms: int) -> list[Any]:
        return self._end("its bulk socket is gone") if event.route == self._route else []

    def _on_tick(self, event: Tick, now_ms: int) -> list[Any]:
        deadline_ms = self.deadline_ms()
        if deadline_ms is None or now_ms < deadline_ms:
            return []
        return self._end(f"the decode node took no KV for {now_ms - self._moved_ms} ms")

    def _send(self, now_ms: int) -> list[Any]:
        """Everything that waits and that credit allows. All of the credit allows any piece."""
        effects: list[Any] = []
        while self._waiting and self._route is not None:
            piece = self._waiting[0]
            size_bytes = piece_bytes(piece, self._layout)
            if size_bytes > self._credit_bytes and self._credit_bytes < self._full_credit_bytes:
                break
            self._waiting.popleft()
            self._credit_bytes -= size_bytes
            production = self._productions[piece.slot, piece.epoch]
            production.waiting -= 1
            production.in_flight += 1
            self._sent += 1
            self._moved_ms = now_ms
            effects.append(SendFrame(self._route, self.session, self._sent, piece))
        return effects

    def _end(self, reason: str) -> list[Any]:
        return [EndSession(self.session, reason)]


@dataclass(slots=True)
class _Arrival:
    """What is still to come for one slot: the chunks left, and the next place in the first of them."""

    epoch: int
    chunks: deque[tuple[int, int]]
    layer: int = 0
    position: int = 0


class BulkReceiver:
    """One session's pieces on the decode node."""

    def __init__(self, session: str, layout: KvLayout, chunk_tokens: int) -> None:
        """`chunk_tokens`: where the prefill node cuts a prompt."""
        self.session = session
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._told_ms = 0
        self._sent = 0
        self._received = 0
        self._arrivals: dict[int, _Arrival] = {}
        self.fenced_pieces = 0
        self._handlers = {
            ExpectChunks: self._on_expect,
            ForgetChunks: self._on_forget,
            FrameReceived: self._on_frame,
            BadFrame: self._on_bad_frame,
            RouteLost: self._on_route_lost,
        }

    def open(self) -> SendFrame:
        """The first message of the socket."""
        return self._frame(BulkOpen(limits.KV_CREDIT_BYTES))

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: Land, SendFrame (of a Credit), PiecesMoved, ChunksLanded, EndSession."""
        return self._handlers[type(event)](event, now_ms)

    def _on_expect(self, event: ExpectChunks, now_ms: int) -> list[Any]:
        bounds = chunk_bounds(event.start, event.end, self._chunk_tokens)
        self._arrivals[event.slot] = _Arrival(event.epoch, deque(bounds), 0, event.start)
        return []

    def _on_forget(self, event: ForgetChunks, now_ms: int) -> list[Any]:
        arrival = self._arrivals.get(event.slot)
        if arrival is not None and arrival.epoch == event.epoch:
            del self._arrivals[event.slot]
        return []

    def _on_frame(self, event: FrameReceived, now_ms: int) -> list[Any]:
        piece = event.message
        if event.session != self.session or not isinstance(piece, KvPiece):
            return self._end(f"{ErrorCode.PROTOCOL_ERROR}: a {type(piece).__name__} on the bulk socket")
        if event.sequence != self._received + 1:
            expected = self._received + 1
            return self._end(f"{ErrorCode.SEQUENCE_ERROR}: piece {event.sequence} of KV after {expected - 1}")
        self._received += 1
        credit = self._frame(Credit(piece_bytes(piece, self._layout)))
        arrival = self._arrivals.get(piece.slot)
        if arrival is None or piece.epoch != arrival.epoch:
            self.fenced_pieces += 1
            return [credit]
        if not self._is_next(piece, arrival):
            return self._end(f"{ErrorCode.PROTOCOL_ERROR}: a piece of KV out of its place")
        effects: list[Any] = [Land(piece), credit]
        if now_ms - self._told_ms >= limits.KV_MOVED_MS:
            self._told_ms = now_ms
            effects.append(PiecesMoved(self.session, piece.slot, piece.epoch))
        if not arrival.chunks:
            del self._arrivals[piece.slot]
            effects.append(ChunksLanded(self.session, piece.slot, piece.epoch))
        return effects

    def _is_next(self, piece: KvPiece, arrival: _Arrival) -> bool:
        """Whether the piece belongs at the place that is next; moves on if so."""
        start, end = arrival.chunks[0]
        whole = piece.start == start and piece.end == end
        fits = piece.layer == arrival.layer and piece.start == arrival.position
        layers_left = self._layout.layers - piece.layer
        bounded = piece.start < piece.end <= end and 1 <= piece.layer_count <= layers_left
        if not (fits and bounded and (whole or piece.layer_count == 1)):
            return False
        arrival.position = piece.end
        if piece.end == end:
            arrival.layer, arrival.position = piece.layer + piece.layer_count, start
        if arrival.layer == self._layout.layers:
            arrival.chunks.popleft()
            arrival.layer = 0
            arrival.position = arrival.chunks[0][0] if arrival.chunks else end
        return True

    def _on_bad_frame(self, event: BadFrame, now_ms: int) -> list[Any]:
        return self._end(f"{ErrorCode.PROTOCOL_ERROR} on the bulk socket: {event.detail}")

    def _on_route_lost(self, event: RouteLost, now_ms: int) -> list[Any]:
        return self._end("its bulk socket is gone")

    def _frame(self, message: BulkOpen | Credit) -> SendFrame:
        self._sent += 1
        return SendFrame(BULK_ROUTE, self.session, self._sent, message)

    def _end(self, reason: str) -> list[Any]:
        return [EndSession(self.session, reason)]
