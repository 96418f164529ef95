"""Sessions, bulk sockets and core of a prefill node as one pure object.

Decides how effects of one layer become events of the other; stepped by the node's wiring and by simulation
alike. It must never do I/O: what has to happen outside comes back as `SendFrame`, `ToBulk`, `RunChunk`,
`PreparePlane` or `ExitNode`, and `SessionLost` as news for the log.
"""

from typing import Any

from common.kv_layout import KvLayout
from common.prefix_commands import BlocksStored
from prefill_node import events as ev
from prefill_node.core import PrefillCore
from transport.bulk import (
    BulkSender,
    ChunkOffered,
    ChunksLetGo,
    CloseBulk,
    FromBulk,
    PiecesMoved,
    SendsDropped,
    ToBulk,
)
from transport.listener import Listener
from transport.peers import (
    BadFrame,
    Delivered,
    EndSession,
    FrameReceived,
    HelloArrived,
    Mistake,
    RouteLost,
    SendFrame,
    SessionEnded,
    Tick,
)
from transport.stack import Stack


class PrefillStack(Stack):
    """A listener, the prefill core, and a bulk sender for each session whose KV is sent."""

    def __init__(self, listener: Listener, core: PrefillCore, layout: KvLayout, give_up_ms: int) -> None:
        """give_up_ms: how long a decode node may take no KV that waits for it."""
        self.senders: dict[str, BulkSender] = {}
        self._layout = layout
        self._give_up_ms = give_up_ms
        handlers = {
            Tick: self._on_tick,
            FrameReceived: self._to_listener,
            BadFrame: self._to_listener,
            RouteLost: self._to_listener,
            EndSession: self._to_listener,
            HelloArrived: self._on_hello,
            SessionEnded: self._on_session_ended,
            Delivered: self._on_delivered,
            Mistake: self._on_mistake,
            FromBulk: self._on_from_bulk,
            ChunkOffered: self._to_sender,
            SendsDropped: self._to_sender,
            ChunksLetGo: self._to_core,
            PiecesMoved: self._to_core,
            ev.PlanePrepared: self._on_plane_prepared,
            ev.ChunkComputed: self._to_core,
            ev.ComputeFailed: self._to_core,
            ev.PrefixCorrupt: self._to_core,
            BlocksStored: self._to_core,
            ev.BulkReleased: self._to_core,
            ev.StopRequested: self._to_core,
            ev.AnswerHello: self._on_answer,
            ev.SendMessage: self._on_send,
            ev.CloseSession: self._on_close,
        }
        super().__init__(listener, core, handlers)

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        deadlines = [self.listener.deadline_ms(), self.core.deadline_ms()]
        deadlines += [sender.deadline_ms() for sender in self.senders.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _on_tick(self, event: Tick, now_ms: int) -> list[Any]:
        effects = self.listener.step(event, now_ms)
        for sender in list(self.senders.values()):
            effects += self._sender_effects(sender, event, now_ms)
        return effects + self.core.step(ev.TimePassed(), now_ms)

    def _on_hello(self, event: HelloArrived, now_ms: int) -> list[Any]:
        return self.core.step(ev.HelloReceived(event.route, event.hello), now_ms)

    def _on_delivered(self, event: Delivered, now_ms: int) -> list[Any]:
        return self.core.step(ev.MessageReceived(event.session, event.message), now_ms)

    def _on_mistake(self, event: Mistake, now_ms: int) -> list[Any]:
        return self.core.step(ev.ClientMistake(event.session, event.detail), now_ms)

    def _on_session_ended(self, event: SessionEnded, now_ms: int) -> list[Any]:
        # At once: a HELLO that ended this session follows, and must find it ended.
        [lost] = self._news(event)
        effects = self.core.step(lost, now_ms)
        if self.senders.pop(event.session, None) is not None:
            effects.append(ToBulk(event.session, CloseBulk()))
        return effects

    def _news(self, item: Any) -> list[Any]:
        if not isinstance(item, SessionEnded):
            return []
        return [ev.SessionLost(item.session, item.role, item.cause)]

    def _on_plane_prepared(self, event: ev.PlanePrepared, now_ms: int) -> list[Any]:
        if event.bulk is not None:
            self.senders[event.session] = BulkSender(event.session, self._layout, self._give_up_ms)
        return self.core.step(event, now_ms)

    def _on_from_bulk(self, event: FromBulk, now_ms: int) -> list[Any]:
        sender = self.senders.get(event.session)
        return [] if sender is None else self._sender_effects(sender, event.item, now_ms)

    def _to_sender(self, event: ChunkOffered | SendsDropped, now_ms: int) -> list[Any]:
        sender = self.senders.get(event.session)
        return [] if sender is None else self._sender_effects(sender, event, now_ms)

    def _sender_effects(self, sender: BulkSender, event: Any, now_ms: int) -> list[Any]:
        effects = sender.step(event, now_ms)
        return [
            ToBulk(sender.session, effect) if isinstance(effect, SendFrame) else effect for effect in effects
        ]
