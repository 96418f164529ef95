"""The wiring of a prefill node.

Decides which object talks to which: listener port, slab, compute thread and stack. Run by
`transport.daemon.Daemon` on the loop thread. It must never decide anything about slots or sessions, and never
compute.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common import limits
from common.block_store import BlockStore
from common.compatibility import prefix_identity, profile_of, wire_layout
from common.cpus import pin_process
from common.data_planes import SHM, TCP, planes_of
from common.endpoints import bulk_host
from common.engines.loading import EngineLoaded, LoadFailed
from common.errors import ConfigError, ErrorCode, ExitStatus
from common.hooks import HoldPoints
from common.ids import new_session_id
from common.kv_layout import KvLayout
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import PrefillDone, PrefillFailed, ShmPlane, TcpPlane
from common.prefill_config import PrefillConfig
from common.prefix_commands import StoreBlocks
from prefill_node import events as ev
from prefill_node.compute import PrefillCompute
from prefill_node.core import PrefillCore
from prefill_node.production import PrefillSettings
from prefill_node.stack import PrefillStack
from transport.bulk import CloseBulk, FromBulk, ToBulk
from transport.bulk_link import BulkSource
from transport.curve import denial_logger, with_denials
from transport.daemon import stall_bound_ms
from transport.key_files import listening_keys
from transport.landing import parts_of
from transport.link import RouterLink
from transport.listener import Listener
from transport.loop import Loop, Mailbox
from transport.peers import BadFrame, LivenessTimes, SendFrame
from transport.port import ControlPort
from transport.slab import NoSharedMemory, Slab, memory_is_shared, remove_stale_slabs
from transport.zmq_sockets import new_context


class PrefillNode:
    """One prefill daemon; see `transport.daemon.Node` for the methods."""

    role = "prefill"

    def __init__(self, config: PrefillConfig, log: NodeLog, incarnation: str) -> None:
        self.incarnation = incarnation
        self.leaving: tuple[int, str] | None = None
        self._config = config
        self._log = log
        self._context = new_context()
        self._hooks = HoldPoints(config.hold_dir, log)
        self._port: ControlPort | None = None
        self._slab: Slab | None = None
        self._layout: KvLayout | None = None
        self._bulk: dict[str, BulkSource] = {}
        self._closing: dict[str, BulkSource] = {}
        self._stack: PrefillStack | None = None

    def bind(self, loop: Loop) -> str:
        pin_process(self._config.cpus, self._log)
        for name in remove_stale_slabs():
            self._log.info(LogEvent.SLAB_REMOVED, slab=name)
        config = self._config
        self._keys = listening_keys(config.key_file, config.allowed_keys)
        link = RouterLink(self._context, config.bind, self._keys, denial_logger(self._log))
        self._port = ControlPort(link, give_up_ms=self._config.lease_ms)
        self._loop = loop
        self._mailbox = Mailbox(loop.wakeup)
        self._compute = PrefillCompute(self._config.engine_settings(), self._mailbox, self._hooks, self._log)
        self._log.info(LogEvent.NODE_LOADING, backend=self._config.backend, model=self._config.model)
        self._compute.start()
        return link.endpoint

    def load(self) -> bool:
        for item in self._mailbox.take():
            if isinstance(item, LoadFailed):
                raise ConfigError(item.detail)
            if isinstance(item, EngineLoaded):
                self._begin(item)
                return True
        return False

    def _begin(self, loaded: EngineLoaded) -> None:
        # Not before: a HELLO that waits for the engine would end every poll.
        self._port.link.attend()
        self._loop.watch(self._port.link.sockets)
        config, capabilities = self._config, loaded.capabilities
        layout = capabilities.layout
        profile = profile_of(capabilities, "" if config.kv_wire_dtype == "auto" else config.kv_wire_dtype)
        wire = wire_layout(profile)
        planes = self._make_slab(config.source_slots, wire)
        store = BlockStore(layout, config.prefix_block_tokens, config.prefix_cache_mb * 2**20)
        profile = replace(profile, keeps_prefixes=store.places > 0)
        self._layout = wire
        self._compute.attach(self._slab, wire, store)
        stall_ms = stall_bound_ms(config.stall_ms, capabilities.longest_chunk_ms)
        settings = PrefillSettings(
            incarnation=self.incarnation,
            profile=profile,
            slot_count=config.source_slots,
            plane=self._shared_plane(),
            token_bytes=wire.token_bytes,
            lease_ms=config.lease_ms,
            stall_ms=stall_ms,
            drain_ms=config.drain_ms,
            # Each decode node has a slot at least: one that had to wait for a slot could do nothing.
            decode_nodes=config.source_slots,
            slots_per_session=config.slots_per_session or config.source_slots,
            planes=planes,
            prefix_places=store.places,
            prefix_block_tokens=config.prefix_block_tokens,
            prefix_identity=prefix_identity(capabilities, config.prefix_block_tokens),
        )
        core = PrefillCore(settings, new_session_id)
        times = LivenessTimes(config.ping_ms, config.suspect_ms, config.dead_after_ms, config.lease_ms)
        self._stack = PrefillStack(Listener(times, core.progress_count), core, wire, config.lease_ms)

    def _shared_plane(self) -> ShmPlane | None:
        if self._slab.name is None:
            return None
        return ShmPlane(self._slab.name, self._slab.slot_count, self._slab.slot_bytes)

    def _make_slab(self, slot_count: int, layout: KvLayout) -> tuple[str, ...]:
        """The slab, in shared memory if it may be and there is any; the data planes that this allows."""
        planes = planes_of(self._config.kv_plane)
        try:
            self._slab = Slab(slot_count, layout.slot_bytes, shared=SHM in planes)
        except NoSharedMemory as error:
            if TCP not in planes:
                raise
            self._log.warning(LogEvent.NO_SHARED_MEMORY, detail=f"{error}; KV goes over TCP alone")
            self._slab = Slab(slot_count, layout.slot_bytes, shared=False)
            return (TCP,)
        return planes

    def receive(self) -> Iterator[Any]:
        yield from self._mailbox.take()
        for session, source in list(self._bulk.items()):
            yield from (FromBulk(session, item) for item in source.receive())
        for item in self._port.receive():
            if isinstance(item, BadFrame):
                self._log.warning(LogEvent.PEER_PROTOCOL_ERROR, code=item.code, detail=item.detail)
            yield item

    def step(self, event: Any, now_ms: int) -> list[Any]:
        return self._stack.step(event, now_ms)

    def execute(self, effect: Any, now_ms: int) -> list[Any]:
        match effect:
            case SendFrame():
                self._log_completion(effect.message)
                lost = self._port.send(with_denials(effect, self._port.link.clients_denied), now_ms)
                return [] if lost is None else [lost]
            case ev.RunChunk() | StoreBlocks():
                self._compute.put(effect)
            case ToBulk(session=session, item=item):
                return self._to_bulk(session, item)
            case ev.PreparePlane():
                return [self._prepare_plane(effect)]
            case ev.SessionLost():
                self._log.info(LogEvent.SESSION_ENDED, session=effect.session, cause=effect.cause)
            case ev.ExitNode(status=status, reason=reason):
                self.leaving = (status, reason)
        return []

    def _prepare_plane(self, wanted: ev.PreparePlane) -> ev.PlanePrepared:
        session, route = wanted.session, wanted.route
        if wanted.memory_probe is not None and memory_is_shared(wanted.memory_probe):
            return ev.PlanePrepared(session, route, bulk=None)
        config = self._config
        try:
            source = BulkSource(self._context, bulk_host(config.bind), config.kv_port, self._keys)
        except ConfigError as error:
            return ev.PlanePrepared(session, route, bulk=None, problem=str(error))
        self._bulk[session] = source
        self._loop.watch(source.sockets)
        return ev.PlanePrepared(session, route, TcpPlane(source.port))

    def _to_bulk(self, session: str, item: Any) -> list[Any]:
        source = self._bulk[session]
        if isinstance(item, CloseBulk):
            self._closing[session] = self._bulk.pop(session)
            self._loop.forget(source.sockets)
            source.close()
            return []
        parts = parts_of(self._slab.slot(item.message.slot), item.message, self._layout)
        return [FromBulk(session, lost) for lost in source.send(item, parts)]

    def _log_completion(self, message: Any) -> None:
        if isinstance(message, PrefillDone):
            self._log.info(
                LogEvent.PREFILL_DONE,
                job=message.job_id,
                slot=message.slot,
                epoch=message.epoch,
                tokens=message.token_count,
                compute_us=message.compute_us,
            )
        elif isinstance(message, PrefillFailed):
            cancelled = message.code is ErrorCode.CANCELLED
            self._log.info(
                LogEvent.PREFILL_CANCELLED if cancelled else LogEvent.PREFILL_FAILED,
                job=message.job_id,
                slot=message.slot,
                epoch=message.epoch,
                code=message.code,
                detail=message.detail,
            )

    def flush(self, now_ms: int) -> list[Any]:
        events = list(self._port.flush(now_ms))
        for session, source in self._bulk.items():
            events += [FromBulk(session, item) for item in source.flush()]
        for session, source in list(self._closing.items()):
            source.flush()
            if source.quiet:
                del self._closing[session]
                events.append(ev.BulkReleased(session))
        return events

    def deadline_ms(self, now_ms: int) -> int | None:
        deadlines = [self._stack.deadline_ms(), self._port.deadline_ms(now_ms)]
        deadlines += [source.deadline_ms(now_ms) for source in self._bulk.values()]
        deadlines += [now_ms + limits.LET_GO_RETRY_MS for _ in self._closing]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def stack(self) -> Any:
        return self._stack

    def check(self) -> None:
        self._stack.core.check()

    def stop_requested(self) -> Any:
        return ev.StopRequested()

    def close(self, orderly: bool) -> None:
        if orderly and self.leaving is not None and self.leaving[0] == ExitStatus.OK:
            self._compute.stop()
        for source in self._bulk.values():
            source.close()
        if self._port is not None:
            self._port.finish()
            self._port.close()
        if self._slab is not None:
            self._slab.unlink()
        # Last words, such as FAILED(ENGINE_HUNG), get the time that the sockets linger.
        self._context.term()
