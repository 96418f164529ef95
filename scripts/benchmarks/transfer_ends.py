"""Both ends of a transfer that is measured: a raw loop over ZeroMQ, and Tandem's own bulk objects.

Decides how the ends are driven: the sender is a process of its own on its own core, the receiver runs in the
caller, and a pipe between them stands for the control socket. Tandem's ends are driven as the daemons drive
theirs: one loop thread with the sockets, one thread for what compute does (the producer's digests, the
importer's). They must never see another transfer than the one that is asked for: every arm opens its own
sockets.
"""

import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
import xxhash

from common import limits
from common.clock import now_us
from common.cpus import pin_process
from common.errors import TandemError
from common.kv_layout import KvLayout, chunk_bounds
from common.log import NodeLog
from common.messages import KvPiece
from transport.bulk import (
    BulkReceiver,
    BulkSender,
    ChunkOffered,
    ChunksLanded,
    ChunksLetGo,
    ExpectChunks,
    Land,
    PiecesMoved,
    pieces_of,
)
from transport.bulk_link import BulkSink, BulkSource
from transport.landing import Landing, parts_of
from transport.loop import Commands, Loop, Mailbox
from transport.peers import SendFrame
from transport.zmq_sockets import bind_bulk_router, connect_bulk_dealer, new_context

ARMS = ("raw", "raw_landed", "tandem", "tandem_digests")
HOST = "127.0.0.1"
SESSION = "bench"
SLOTS = 2
GIVE_UP_MS = 30_000
# What the raw loop may have unread at the receiver: as many bytes as Tandem's credit allows, or so.
RAW_UNREAD_MESSAGES = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `prompts` whole slots, in chunks, in pieces of at most `piece_bytes`."""

    layout: KvLayout
    chunk_tokens: int
    prompts: int
    piece_bytes: int

    @property
    def byte_count(self) -> int:
        return self.prompts * self.layout.slot_bytes

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return chunk_bounds(0, self.layout.max_tokens, self.chunk_tokens)

    def pieces(self, slot: int) -> Iterator[KvPiece]:
        for start, end in self.bounds:
            yield from pieces_of(slot, 1, start, end, self.layout)


@dataclass(frozen=True, slots=True)
class Run:
    """One arm once, in GB/s: by the clock, and by the CPU time of the busier end.

    The second is what a core of its own allows at most; other processes of a busy machine disturb it less.
    """

    gb_per_s: float
    cpu_gb_per_s: float


def cpu_us() -> int:
    """CPU time of this process so far, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(1e6 * (used.ru_utime + used.ru_stime))


@cache
def noise(layout: KvLayout, index: int) -> memoryview:
    """A slot in which every byte is as good as random, and the same in every process."""
    return memoryview(bytearray(np.random.default_rng(index).bytes(layout.slot_bytes)))


def digest_of(slot: memoryview, start: int, end: int, layout: KvLayout) -> bytes:
    """Digest of positions `[start, end)` in wire order, as a prefill node takes it."""
    hasher = xxhash.xxh3_128()
    for part in parts_of(slot, KvPiece(0, 1, start, end, 0, layout.layers), layout):
        hasher.update(part)
    return hasher.digest()


class SenderProcess:
    """The sending end as a process of its own; leaving the context ends it."""

    def __init__(self, cpus: tuple[int, ...] | None) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cpus), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, arm: str, load: Load) -> str:
        """Have it ready for one arm; the endpoint to connect to."""
        limits.KV_PIECE_BYTES = load.piece_bytes
        self.pipe.send((arm, load))
        return f"tcp://{HOST}:{self.pipe.recv()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.pipe.send(None)
            self._process.join(GIVE_UP_MS / 1_000)
        self._process.kill()


def _serve(pipe: Connection, cpus: tuple[int, ...] | None) -> None:
    """The sender's process: one order after another, until None."""
    pin_process(cpus, NodeLog(node="sender", incarnation="bench"))
    context = new_context()
    while (order := pipe.recv()) is not None:
        arm, load = order
        limits.KV_PIECE_BYTES = load.piece_bytes
        for index in range(SLOTS):
            noise(load.layout, index)
        started_us = cpu_us()
        if arm.startswith("raw"):
            _send_raw(context, pipe, load)
        else:
            _TandemSender(context, pipe, load, digests=arm == "tandem_digests").run()
        pipe.send(cpu_us() - started_us)
    context.term()


def _send_raw(context: Any, pipe: Connection, load: Load) -> None:
    socket, port = bind_bulk_router(context, HOST, 0, None)
    pipe.send(port)
    route, _ = socket.recv_multipart()
    for number in range(load.prompts):
        slot = noise(load.layout, number % SLOTS)
        for piece in load.pieces(0):
            socket.send_multipart([route, *parts_of(slot, piece, load.layout)], copy=False)
    pipe.recv()
    socket.close(linger=0)


class _TandemSender:
    """The prefill node's bulk end: a thread that produces chunks, and a loop that sends them."""

    def __init__(self, context: Any, pipe: Connection, load: Load, digests: bool) -> None:
        self._pipe, self._load, self._digests = pipe, load, digests
        self._source = BulkSource(context, HOST, 0, None)
        self._sender = BulkSender(SESSION, load.layout, GIVE_UP_MS)
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop.wakeup)
        self._let_go = 0
        self._producer = threading.Thread(target=self._mailbox.guard, args=(self._produce,), daemon=True)

    def run(self) -> None:
        self._pipe.send(self._source.port)
        self._producer.start()
        self._loop.watch(self._source.sockets)
        source, loop = self._source, self._loop
        while not (self._let_go >= self._load.prompts and source.quiet):
            loop.end_turn()
            bounds = (source.deadline_ms(loop.now_ms()), self._sender.deadline_ms())
            loop.poll(min((bound for bound in bounds if bound is not None), default=None))
            for item in [*self._mailbox.take(), *source.receive(), *source.flush()]:
                self._step(item)
        self._producer.join()
        self._pipe.recv()
        loop.forget(source.sockets)
        source.close()
        loop.close()

    def _step(self, item: Any) -> None:
        for effect in self._sender.step(item, self._loop.now_ms()):
            match effect:
                case SendFrame(message=piece):
                    parts = parts_of(noise(self._load.layout, piece.slot), piece, self._load.layout)
                    for lost in self._source.send(effect, parts):
                        self._step(lost)
                case ChunksLetGo(chunks=chunks):
                    self._let_go += chunks == len(self._load.bounds)
                case PiecesMoved():
                    continue
                case _:
                    raise TandemError(f"the transfer broke: {effect}")

    def _produce(self) -> None:
        """One production for each order, as compute does it, but already computed."""
        for _ in range(self._load.prompts):
            slot, epoch = self._pipe.recv()
            digests = []
            for start, end in self._load.bounds:
                if self._digests:
                    layout = self._load.layout
                    digests.append(digest_of(noise(layout, slot), start, end, layout))
                self._mailbox.put(ChunkOffered(SESSION, slot, epoch, start, end))
            self._pipe.send(digests)


class ReceivingEnd:
    """The receiving end, in the caller's process: one run of one arm after another."""

    def __init__(self, sender: SenderProcess) -> None:
        self.landings: dict[KvLayout, Landing] = {}
        self._sender = sender
        self._context = new_context()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def run(self, arm: str, load: Load) -> Run:
        """One arm, from the connect to the last byte's arrival, landing or digest."""
        endpoint = self._sender.begin(arm, load)
        if load.layout not in self.landings:
            self.landings[load.layout] = _touched(load.layout)
        started_us, started_cpu_us = now_us(), cpu_us()
        if arm.startswith("raw"):
            self._receive_raw(endpoint, load, lands=arm == "raw_landed")
        else:
            _TandemReceiver(
                self._context, endpoint, load, self.landings[load.layout], self._sender.pipe
            ).run()
        taken_us, used_us = now_us() - started_us, cpu_us() - started_cpu_us
        self._sender.pipe.send("all here")
        busier_us = max(used_us, self._sender.pipe.recv())
        return Run(load.byte_count / taken_us / 1e3, load.byte_count / max(1, busier_us) / 1e3)

    def _receive_raw(self, endpoint: str, load: Load, lands: bool) -> None:
        socket, monitor = connect_bulk_dealer(self._context, endpoint, None)
        socket.rcvhwm = RAW_UNREAD_MESSAGES
        socket.send(b"")
        targets = [self.landings[load.layout].slot(index) for index in range(SLOTS)]
        for number in range(load.prompts):
            target, at = targets[number % SLOTS], 0
            while at < load.layout.slot_bytes:
                for frame in socket.recv_multipart(copy=False):
                    part = frame.buffer
                    if lands:
                        target[at : at + part.nbytes] = part
                    at += part.nbytes
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)


def _touched(layout: KvLayout) -> Landing:
    """Landing buffers whose pages are there, as those of a session that has run for a while."""
    landing = Landing(layout)
    for index in range(SLOTS):
        landing.begin(index, 0)
        np.frombuffer(landing.slot(index), dtype=np.uint8)[:] = 0
    return landing


class _TandemReceiver:
    """The decode node's bulk end: a loop that lands pieces, and a thread that verifies what has landed."""

    def __init__(self, context: Any, endpoint: str, load: Load, landing: Landing, pipe: Connection) -> None:
        self._load, self._landing, self._pipe = load, landing, pipe
        self._sink = BulkSink(context, endpoint, load.layout, None)
        self._receiver = BulkReceiver(SESSION, load.layout, load.chunk_tokens)
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop.wakeup)
        self._landed = Commands()
        self._ordered = 0
        self._importer = threading.Thread(target=self._mailbox.guard, args=(self._verify,), daemon=True)

    def run(self) -> None:
        self._importer.start()
        self._loop.watch(self._sink.sockets)
        self._sink.send(self._receiver.open())
        for _ in range(min(SLOTS, self._load.prompts)):
            self._order()
        verified = 0
        while verified < self._load.prompts:
            self._loop.end_turn()
            self._loop.poll(None)
            for _ in self._mailbox.take():
                verified += 1
                self._order()
            for item in self._sink.receive():
                self._step(item)
        self._importer.join()
        self._loop.forget(self._sink.sockets)
        self._sink.close()
        self._loop.close()

    def _order(self) -> None:
        """Ask for the next prompt, in the slot that has just become free."""
        if self._ordered < self._load.prompts:
            slot, epoch = self._ordered % SLOTS, self._ordered + 1
            self._ordered += 1
            self._receiver.step(ExpectChunks(slot, epoch, 0, self._load.layout.max_tokens), 0)
            self._landing.begin(slot, epoch)
            self._pipe.send((slot, epoch))

    def _step(self, item: Any) -> None:
        for effect in self._receiver.step(item, self._loop.now_ms()):
            match effect:
                case Land(piece=piece):
                    self._landing.land(piece, self._sink.parts)
                case SendFrame():
                    self._sink.send(effect)
                case ChunksLanded():
                    self._landed.put(effect)
                case PiecesMoved():
                    continue
                case _:
                    raise TandemError(f"the transfer broke: {effect}")

    def _verify(self) -> None:
        """Digest what has landed, if the record has digests; as the import does, but for its copy."""
        load = self._load
        for _ in range(load.prompts):
            landed = self._landed.get()
            digests = self._pipe.recv()
            slot = self._landing.slot(landed.slot)
            for (start, end), digest in zip(load.bounds, digests, strict=bool(digests)):
                if digest_of(slot, start, end, load.layout) != digest:
                    raise TandemError(f"tokens {start} to {end} do not match their digest")
            self._mailbox.put(landed)
