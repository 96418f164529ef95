"""A prefill node made by hand: right in every byte until a test makes it say something else.

Decides nothing by itself. It owns a ROUTER, a slab and at most one session with a decode node; KV and logits
come from the oracle. `turn` answers HELLO and PING, so that it lives while the world waits; everything else
that arrives is kept for the test. It stands among the clients of a `World`.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import zmq

from common.digests import bytes_digest
from common.ids import new_incarnation, new_session_id
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import (
    Bye,
    Hello,
    HelloOk,
    NodeProfile,
    Ping,
    Pong,
    Prefill,
    PrefillDone,
    ShmPlane,
    SlotGrant,
)
from tests import oracle
from transport.codec import Header, decode, encode
from transport.slab import Slab

LEASE_MS = 5_000
STALL_MS = 20_000
LAST_EPOCH = 40
POLL_MS = 4


@cache
def _computed(token_ids: tuple[int, ...]) -> tuple[bytes, bytes]:
    """KV and logits of a prompt."""
    logits = np.array(oracle.oracle_logits(token_ids), dtype="<f4")
    return oracle.oracle_kv(token_ids), logits.tobytes()


class HandmadePrefill:
    """One source slot, number 0.

    arrived: what the decode node has said in the present session. farewells: reasons of its BYEs, by session.
    """

    def __init__(self, endpoint: str, profile: NodeProfile, stall_ms: int = STALL_MS) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._profile = profile
        self._stall_ms = stall_ms
        self._layout = KvLayout(
            profile.layers, profile.kv_heads, profile.head_dim, profile.dtype, profile.max_tokens
        )
        self._slab = Slab(1, self._layout.slot_bytes)
        self._incarnation = new_incarnation()
        self._route = b""
        self._sequence = 0
        self._last_epoch = LAST_EPOCH
        self.session = ""
        self.earlier_session = ""
        self.arrived: list[Any] = []
        self.farewells: dict[str, str] = {}

    def turn(self) -> None:
        """Answer HELLO and PING, keep the rest."""
        if not self._socket.poll(POLL_MS):
            return
        while self._socket.poll(0):
            route, *frames = self._socket.recv_multipart()
            header, message = decode(frames)
            if isinstance(message, Hello):
                self._open(route)
            elif header.session != self.session:
                continue
            elif isinstance(message, Ping):
                self.send(Pong(header.sequence, 0))
            elif isinstance(message, Bye):
                self.farewells[header.session] = message.reason
            else:
                self.arrived.append(message)

    def _open(self, route: bytes) -> None:
        self.earlier_session, self.session = self.session, new_session_id()
        self._route, self._sequence, self.arrived = route, 0, []
        plane = ShmPlane(self._slab.name, 1, self._layout.slot_bytes)
        grants = (SlotGrant(0, self._last_epoch),)
        answer = HelloOk(
            self.session, self._incarnation, LEASE_MS, self._stall_ms, self._profile, grants, plane
        )
        self.send_frames(encode(Header(None, 0), answer))

    def send(self, message: Any, session: str | None = None, sequence: int | None = None) -> None:
        """A message with the next number of the present session, or with the given ones."""
        self.send_frames(encode(self.next_header(session, sequence), message))

    def next_header(self, session: str | None = None, sequence: int | None = None) -> Header:
        """The header of the next message, which takes a number unless one is given."""
        if sequence is None:
            self._sequence += 1
            sequence = self._sequence
        return Header(session or self.session, sequence)

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self._route, *frames])

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def said(self, kind: type) -> list[Any]:
        """What of this kind has arrived in the present session."""
        return [message for message in self.arrived if isinstance(message, kind)]

    def produce(self, request: Prefill, **changes: Any) -> PrefillDone:
        """Fill the slot as asked; the record, with what the test changes in it."""
        self._last_epoch = request.epoch
        token_ids = np.frombuffer(request.prompt, dtype="<i4").tolist()
        count, layout = len(token_ids), self._layout
        kv_bytes, logits = _computed(tuple(token_ids))
        kv = np.frombuffer(kv_bytes, dtype=np.uint8)
        kv = kv.reshape(2 * layout.layers, count, layout.row_bytes)
        self._slab.begin(0, request.epoch)
        slot = np.frombuffer(self._slab.slot(0), dtype=np.uint8)
        slot.reshape(2 * layout.layers, layout.max_tokens, layout.row_bytes)[:, :count] = kv
        chunk_tokens = self._profile.chunk_tokens
        bounds = chunk_bounds(0, count, chunk_tokens)
        record = PrefillDone(
            job_id=request.job_id,
            slot=request.slot,
            epoch=request.epoch,
            prompt_digest=request.prompt_digest,
            token_count=count,
            chunk_tokens=chunk_tokens,
            byte_count=count * layout.token_bytes,
            chunk_digests=tuple(bytes_digest(kv[:, start:end].copy()) for start, end in bounds),
            logits=logits,
            logits_digest=bytes_digest(logits),
            queue_us=0,
            compute_us=1,
        )
        return replace(record, **changes)

    def hand_slot_on(self, epoch: int) -> None:
        """Give the slot another owner behind everybody's back."""
        self._slab.begin(0, epoch)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._slab.unlink()
