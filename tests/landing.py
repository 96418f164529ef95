"""A pair of nodes whose KV goes over a bulk socket, for tests of the pure cores; see tests/cores.py.

The socket is two rows of messages that a test holds back, loses or hands on. A piece is read from the slab
when it arrives, as a send without a copy may read it, so a slot that was handed on too early shows.
"""

from collections import deque
from dataclasses import replace
from typing import Any

from common.data_planes import TCP
from common.messages import Finished, NodeProfile, Role, TcpPlane
from decode_node import commands
from decode_node.stack import OpenPlane, PlaneOpened
from prefill_node import events as prefill_ev
from tests.actors import ROUTE, TIMES, WORKER, PrefillSide
from tests.cores import Pair
from tests.devices import PROFILE, Slab, SlotMemory, expected_tokens
from transport.bulk import BULK_ROUTE, CloseBulk, ExpectChunks, FromBulk, Land, PieceLetGo, ToBulk
from transport.connector import Connector
from transport.peers import FrameReceived, SendFrame

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
OTHER = [2, 7, 1, 8, 2, 8]
ROUTE_OF_BULK = b"bulk peer"
RETRY_ROUTE = replace(ROUTE, on_prefill_failure="retry")
DEAD_AFTER_MS = TIMES.dead_after_ms


class SendingSide(PrefillSide):
    """A prefill process that sends its KV; `sent` are the pieces that its sockets took."""

    def __init__(self, incarnation: str, slots: int, profile: NodeProfile = PROFILE) -> None:
        super().__init__(incarnation, slots, profile)
        self.core.settings = replace(self.core.settings, planes=(TCP,))
        self.sent: deque[tuple[str, SendFrame]] = deque()
        self.closed: list[str] = []
        self.others: list[Any] = []
        step = self.stack.step

        def recorded(event: Any, now_ms: int) -> list[Any]:
            effects = step(event, now_ms)
            for effect in effects:
                match effect:
                    case prefill_ev.PreparePlane(session=session, route=route):
                        self.others.append(prefill_ev.PlanePrepared(session, route, TcpPlane(1)))
                    case ToBulk(session=session, item=SendFrame() as frame):
                        self.sent.append((session, frame))
                    case ToBulk(session=session, item=CloseBulk()):
                        self.closed.append(session)
            return effects

        self.stack.step = recorded

    def step(self, event: Any, now_ms: int) -> None:
        super().step(event, now_ms)
        while self.others:
            super().step(self.others.pop(0), now_ms)


class LandingPair(Pair):
    """A pair with one bulk socket. hold_pieces: nothing that is sent arrives; hold_credit: nothing goes back.

    landings: what has arrived of each session, in the place of the slab.
    """

    def __init__(self, **options: Any) -> None:
        self.hold_pieces = self.hold_credit = False
        self.landings: dict[str, Slab] = {}
        self.upward: deque[tuple[str, SendFrame]] = deque()
        self.bulk_closed: list[str] = []
        super().__init__(**{"planes": (TCP,), **options})

    def start_prefill(self, incarnation: str, profile: NodeProfile = PROFILE) -> None:
        if not self.landings:
            name = self.settings.incarnation
            self.decode.connectors[WORKER] = Connector(TIMES, name, Role.DECODE, PROFILE, (TCP,))
        self.prefill = SendingSide(incarnation, self._slots, profile)

    def _execute(self, effect: Any) -> list[Any]:
        match effect:
            case OpenPlane(hello_ok=hello_ok):
                assert hello_ok.plane is None
                slots = [SlotMemory() for _ in range(self._slots)]
                self.landings[hello_ok.session] = self.device.mappings[hello_ok.session] = Slab(slots)
                return [PlaneOpened(WORKER, hello_ok)]
            case ToBulk(session=session, item=SendFrame() as frame):
                self.upward.append((session, frame))
            case ToBulk(session=session, item=ExpectChunks(slot=slot, epoch=epoch)):
                self._check_no_copy(session, slot)
                self.landings[session].slots[slot].epoch = epoch
            case ToBulk(session=session, item=Land(piece=piece)):
                source = self.prefill.slab.slots[piece.slot].token_ids
                target = self.landings[session].slots[piece.slot].token_ids
                target[piece.start :] = source[piece.start : piece.end]
            case ToBulk(session=session, item=CloseBulk()):
                self.bulk_closed.append(session)
            case _:
                return super()._execute(effect)
        return []

    def _check_no_copy(self, session: str, slot: int) -> None:
        copies = [item for item in self.device.commands if isinstance(item, commands.StartImport)]
        reads = [item.record.slot for item in copies if item.session == session]
        assert slot not in reads, "INV-4: a landing buffer is given away while it is copied"

    def deliver(self) -> None:
        super().deliver()
        while self._carry_pieces() + self._carry_credit():
            super().deliver()

    def _carry_pieces(self) -> int:
        moved = 0
        while self.prefill.sent and not self.hold_pieces:
            self.deliver_piece()
            moved += 1
        return moved

    def deliver_piece(self, late: bool = False) -> None:
        """The oldest piece arrives and is let go of; late: it was let go of long ago."""
        session, frame = self.prefill.sent.popleft()
        event = FrameReceived(BULK_ROUTE, session, frame.sequence, frame.message)
        self.step_decode(FromBulk(session, event))
        if not late:
            gone = PieceLetGo(frame.message.slot, frame.message.epoch)
            self.prefill.step(FromBulk(session, gone), self.now_ms)

    def let_go_unseen(self) -> None:
        """All pieces have left the prefill node, and are on their way."""
        for session, frame in self.prefill.sent:
            gone = PieceLetGo(frame.message.slot, frame.message.epoch)
            self.prefill.step(FromBulk(session, gone), self.now_ms)

    def arrive_late(self) -> None:
        """What was on its way arrives; its sender has let go of it long ago."""
        while self.prefill.sent:
            self.deliver_piece(late=True)
        self.deliver()

    def _carry_credit(self) -> int:
        moved = 0
        while self.upward and not self.hold_credit:
            session, frame = self.upward.popleft()
            event = FrameReceived(ROUTE_OF_BULK, session, frame.sequence, frame.message)
            self.prefill.step(FromBulk(session, event), self.now_ms)
            moved += 1
        return moved

    def job_with_record(self, label: str = "a", prompt: list[int] = PROMPT, **sampling: Any) -> None:
        """A job whose record is here and whose chunks are on their way."""
        self.hold_pieces = True
        self.client.submit(label, prompt, **sampling)
        self.prefill_all()
        self.let_go_unseen()
        self.deliver()

    def check_finished(self, label: str, prompt: list[int], count: int = 4) -> None:
        assert isinstance(self.client.answer(label), Finished), self.client.answer(label)
        assert self.client.tokens(label) == expected_tokens(prompt, count)

    def check_at_rest(self) -> None:
        """Nothing is held on either side."""
        self.deliver()
        assert set(self.slot_states()) <= {"free"}
        assert set(self.source_states()) == {"idle"}
        assert not list(self.worker.ledger.survivors())
        assert self.core.status(self.now_ms)["idle"]
