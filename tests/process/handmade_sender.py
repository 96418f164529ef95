"""A prefill node made by hand whose KV goes over TCP: right in every piece until a test says so.

Decides nothing by itself, as `HandmadePrefill`, which it is; it binds a bulk ROUTER for each session. A test
sends the pieces, right or wrong. What comes back over the bulk socket is kept.
"""

from typing import Any

import zmq

from common.ids import new_session_id
from common.kv_layout import chunk_bounds
from common.messages import HelloOk, KvPiece, Prefill, SlotGrant, TcpPlane
from tests.process.handmade_prefill import LEASE_MS, HandmadePrefill
from transport.bulk import pieces_of
from transport.codec import Header, decode, encode
from transport.landing import parts_of


class HandmadeSender(HandmadePrefill):
    """bulk_heard: messages of the bulk socket of the present session. bulk_route: its peer, b"" before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bulk: zmq.Socket | None = None
        self._piece_sequence = 0
        self.bulk_route = b""
        self.bulk_heard: list[Any] = []

    def turn(self) -> None:
        super().turn()
        while self._bulk is not None and self._bulk.poll(0):
            self.bulk_route, *frames = self._bulk.recv_multipart()
            self.bulk_heard.append(decode(frames)[1])

    def _open(self, route: bytes) -> None:
        self.earlier_session, self.session = self.session, new_session_id()
        self._route, self._sequence, self.arrived = route, 0, []
        self._close_bulk()
        self._bulk = self._context.socket(zmq.ROUTER)
        self._bulk.setsockopt(zmq.LINGER, 0)
        port = self._bulk.bind_to_random_port("tcp://127.0.0.1")
        self._piece_sequence, self.bulk_route, self.bulk_heard = 0, b"", []
        answer = HelloOk(
            self.session,
            self._incarnation,
            LEASE_MS,
            self._stall_ms,
            self._profile,
            (SlotGrant(0, self._last_epoch),),
            bulk=TcpPlane(port),
        )
        self.send_frames(encode(Header(None, 0), answer))

    def pieces(self, request: Prefill) -> list[KvPiece]:
        """All pieces of a production, in their order."""
        count = len(request.prompt) // 4
        bounds = chunk_bounds(0, count, self._profile.chunk_tokens)
        return [
            piece
            for start, end in bounds
            for piece in pieces_of(request.slot, request.epoch, start, end, self._layout)
        ]

    def parts(self, piece: KvPiece) -> list[bytes]:
        """What lies in the slot where the piece says."""
        return [bytes(part) for part in parts_of(self._slab.slot(0), piece, self._layout)]

    def send_piece(
        self,
        piece: Any,
        parts: list[bytes] | None = None,
        session: str | None = None,
        sequence: int | None = None,
    ) -> None:
        """A message over the bulk socket; its right frames, session and number unless others are given."""
        if sequence is None:
            self._piece_sequence += 1
            sequence = self._piece_sequence
        head = encode(Header(session or self.session, sequence), piece)
        self.send_bulk_frames([*head, *(self.parts(piece) if parts is None else parts)])

    def send_bulk_frames(self, frames: list[bytes]) -> None:
        self._bulk.send_multipart([self.bulk_route, *frames])

    def close_bulk(self) -> None:
        """The bulk socket is gone; the session lives."""
        self._close_bulk()

    def _close_bulk(self) -> None:
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None

    def close(self) -> None:
        self._close_bulk()
        super().close()
