"""The wiring of a decode node.

Decides which object talks to which: client port, worker port, slab mappings, compute and text threads, and
the stack. Run by `transport.daemon.Daemon` on the loop thread. It must never decide anything about jobs,
slots or sessions, and never compute.
"""

from collections.abc import Iterator
from typing import Any

from common.block_store import BlockStore
from common.compatibility import (
    engine_form,
    import_converter,
    prefix_identity,
    profile_of,
    wire_form,
    wire_layout,
)
from common.cpus import pin_process
from common.data_planes import SHM, TCP, planes_of
from common.decode_config import DecodeConfig
from common.endpoints import bulk_endpoint
from common.engines.loading import EngineLoaded, LoadFailed
from common.errors import ConfigError, ExitStatus
from common.hooks import HoldPoints
from common.ids import new_incarnation, new_job_id, new_session_id
from common.kv_convert import KvConverter, describe_form
from common.kv_layout import KvLayout
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import HelloOk, NodeProfile, Role, ShmPlane
from common.prefix_commands import StoreBlocks
from decode_node import commands
from decode_node import events as ev
from decode_node.cache_files import FILE_COMMANDS, CacheFiles
from decode_node.compute import DecodeCompute
from decode_node.core import DecodeCore
from decode_node.job_log import log_answer, log_end
from decode_node.kv_import import ImportFrom, KvSource
from decode_node.prefix_cache import PrefixSettings
from decode_node.scheduler import Route
from decode_node.settings import DecodeSettings
from decode_node.stack import (
    DecodeStack,
    FromWorker,
    OpenPlane,
    PlaneOpened,
    PlaneRefused,
    ToWorker,
)
from decode_node.text_thread import TextThread, TokenizerLoaded
from transport.bulk import CloseBulk, ExpectChunks, FromBulk, Land, ToBulk
from transport.bulk_link import BulkSink
from transport.connector import Connector
from transport.curve import denial_logger, with_denials
from transport.daemon import stall_bound_ms
from transport.key_files import connecting_keys, listening_keys
from transport.landing import Landing
from transport.link import DealerLink, RouterLink
from transport.listener import Listener
from transport.loop import Loop, Mailbox
from transport.peers import BadFrame, CloseSocket, LivenessTimes, OpenSocket, RouteLost, SendFrame
from transport.port import ControlPort
from transport.slab import MemoryProbe, SlabView
from transport.zmq_sockets import new_context

_FOR_TEXT = (commands.PrepareSubmission, commands.TokenizeText, commands.PushTokens)
_FOR_CACHE = (StoreBlocks, *FILE_COMMANDS)
_FOR_COMPUTE = (
    commands.SampleFirst,
    commands.StartLocalPrefill,
    commands.StartDecode,
    commands.StartChoice,
    commands.StopLane,
    *_FOR_CACHE,
)
_COMPUTE_FIRST = (*_FOR_COMPUTE, commands.StartImport, commands.ForgetJob)


def _urgency(effect: Any) -> int:
    """KV lands before anybody is told to read it; then compute, for which the lane waits; then the rest."""
    if isinstance(effect, ToBulk) and isinstance(effect.item, Land):
        return 0
    return 1 if isinstance(effect, _COMPUTE_FIRST) else 2


class DecodeNode:
    """One decode daemon; see `transport.daemon.Node` for the methods."""

    role = "decode"

    def __init__(self, config: DecodeConfig, log: NodeLog, incarnation: str) -> None:
        self.incarnation = incarnation
        self.leaving: tuple[int, str] | None = None
        self._config = config
        self._log = log
        self._context = new_context()
        self._hooks = HoldPoints(config.hold_dir, log)
        self._clients: ControlPort | None = None
        self._workers: dict[str, ControlPort] = {}
        self._sources: dict[str, KvSource] = {}
        self._sinks: dict[str, BulkSink] = {}
        self._probe = MemoryProbe()
        self._attempts: set[str] = set()
        self._loaded: dict[type, Any] = {}
        self._stack: DecodeStack | None = None

    def bind(self, loop: Loop) -> str:
        pin_process(self._config.cpus, self._log)
        config = self._config
        self._worker_keys = {
            worker: connecting_keys(config.key_file, config.server_key_of(worker))
            for worker in config.pd_prefill_worker
        }
        keys = listening_keys(config.key_file, config.allowed_keys)
        link = RouterLink(self._context, config.bind, keys, denial_logger(self._log))
        self._clients = ControlPort(link, give_up_ms=self._config.lease_ms)
        self._loop = loop
        self._mailbox = Mailbox(loop.wakeup)
        settings = self._config.engine_settings()
        self._compute = DecodeCompute(settings, self._mailbox, self._hooks, self._log)
        self._text = TextThread(settings, self._mailbox, self._hooks)
        self._log.info(LogEvent.NODE_LOADING, backend=self._config.backend, model=self._config.model)
        self._compute.start()
        self._text.start()
        return link.endpoint

    def load(self) -> bool:
        for item in self._mailbox.take():
            if isinstance(item, LoadFailed):
                raise ConfigError(item.detail)
            self._loaded[type(item)] = item
        if self._loaded.keys() != {EngineLoaded, TokenizerLoaded}:
            return False
        self._begin(self._loaded[EngineLoaded], self._loaded[TokenizerLoaded])
        return True

    def _begin(self, engine: EngineLoaded, tokenizer: TokenizerLoaded) -> None:
        # Not before: a HELLO that waits for the engine would end every poll.
        self._clients.link.attend()
        self._loop.watch(self._clients.link.sockets)
        config, capabilities = self._config, engine.capabilities
        self._compute.use_eos(tokenizer.eos_token_ids)
        store = BlockStore(capabilities.layout, config.prefix_block_tokens, config.prefix_cache_mb * 2**20)
        identity = prefix_identity(capabilities, config.prefix_block_tokens)
        files = CacheFiles(store, identity, config.prefix_cache_dir, self._mailbox.put)
        self._compute.use_store(store, files)
        settings = DecodeSettings(
            incarnation=self.incarnation,
            profile=profile_of(capabilities),
            lease_ms=config.lease_ms,
            dead_after_ms=config.dead_after_ms,
            stall_ms=stall_bound_ms(config.stall_ms, capabilities.longest_chunk_ms),
            drain_ms=config.drain_ms,
            max_queue=config.max_queue,
            prefill_timeout_ms=config.prefill_timeout_ms,
            prefill_wait_ms=config.prefill_wait_ms,
            job_timeout_ms=config.job_timeout_ms,
            prefill_retries=config.prefill_retries,
            planes=planes_of(config.kv_plane),
            chunk_us=capabilities.chunk_us,
            prefix=PrefixSettings(
                store.places,
                identity,
                config.prefix_cache_scope == "client",
                config.prefix_cache_dir is not None,
            ),
        )
        route = Route(
            prefill_workers=config.pd_prefill_worker,
            remote_only=config.pd_remote_only,
            backend=config.backend,
            slots=config.slots,
            prefetch_depth=config.prefetch_depth,
            prefetch_auto=config.prefetch_auto,
            on_prefill_failure=config.on_prefill_failure,
            min_remote_prompt_tokens=config.min_remote_tokens,
        )
        core = DecodeCore(settings, route, new_session_id, new_job_id)
        times = LivenessTimes(config.ping_ms, config.suspect_ms, config.dead_after_ms, config.lease_ms)
        # A name of its own towards prefill nodes: whoever knew it could end this node's sessions there, and
        # clients are shown the incarnation in STATUS.
        name = new_incarnation()
        planes = planes_of(config.kv_plane)
        probe = self._probe.name if SHM in planes else None
        connectors = {
            worker: Connector(times, name, Role.DECODE, settings.profile, planes, probe)
            for worker in config.pd_prefill_worker
        }
        self._stack = DecodeStack(Listener(times, core.progress_count), connectors, core)

    def receive(self) -> Iterator[Any]:
        yield from self._mailbox.take()
        # What comes out may close one of them.
        for worker, port in list(self._workers.items()):
            for item in port.receive():
                self._log_bad_frame(item, worker)
                yield FromWorker(worker, item)
        for session, sink in list(self._sinks.items()):
            for item in sink.receive():
                self._log_bad_frame(item, "prefill node, bulk")
                yield FromBulk(session, item)
        for item in self._clients.receive():
            self._log_bad_frame(item, "client")
            yield item

    def step(self, event: Any, now_ms: int) -> list[Any]:
        # Compute's commands first: the lane waits for them, everybody else has time. Order is kept among
        # them, and among the rest.
        effects = self._stack.step(event, now_ms)
        return sorted(effects, key=_urgency)

    def execute(self, effect: Any, now_ms: int) -> list[Any]:
        if isinstance(effect, SendFrame):
            log_answer(self._log, effect.message)
            lost = self._clients.send(with_denials(effect, self._clients.link.clients_denied), now_ms)
            return [] if lost is None else [lost]
        if isinstance(effect, ToWorker):
            return self._to_worker(effect.worker, effect.item, now_ms)
        if isinstance(effect, ToBulk):
            return self._to_bulk(effect.session, effect.item)
        if isinstance(effect, _FOR_TEXT):
            self._text.put(effect)
        elif isinstance(effect, _FOR_COMPUTE):
            self._compute.put(effect)
        else:
            return self._rare(effect)
        return []

    def _rare(self, effect: Any) -> list[Any]:
        match effect:
            case commands.ForgetJob():
                self._text.put(effect)
                if effect.known_to_compute:
                    self._compute.put(effect)
            case commands.StartImport(session=session):
                self._compute.put(ImportFrom(effect, self._sources[session]))
            case OpenPlane(worker=worker, hello_ok=hello_ok):
                return [self._open_plane(worker, hello_ok)]
            case ev.ClosePlane(session=session):
                self._sources.pop(session, None)
            case ev.WorkerOpened(worker=worker, hello_ok=hello_ok):
                slots, session = len(hello_ok.grants), hello_ok.session
                plane = TCP if hello_ok.plane is None else SHM
                self._log.info(
                    LogEvent.SESSION_OPENED, peer=worker, session=session, slots=slots, kv_plane=plane
                )
                if slots < self._config.prefetch_depth:
                    self._log.warning(LogEvent.DEPTH_CLAMPED, asked=self._config.prefetch_depth, slots=slots)
            case ev.WorkerLost(worker=worker, session=session, cause=cause):
                self._log.info(LogEvent.SESSION_ENDED, peer=worker, session=session, cause=cause)
            case ev.ClientLost(session=session, cause=cause):
                self._log.info(LogEvent.SESSION_ENDED, peer="client", session=session, cause=cause)
            case ev.WorkerRefused(worker=worker, refusal=refusal):
                self._log.warning(LogEvent.HELLO_REFUSED, peer=worker, detail=refusal.detail)
            case ev.ReportEnd():
                log_end(self._log, effect)
            case ev.ExitNode(status=status, reason=reason):
                self.leaving = (status, reason)
        return []

    def _open_plane(self, worker: str, hello_ok: HelloOk) -> PlaneOpened | PlaneRefused:
        session, layout = hello_ok.session, wire_layout(hello_ok.profile)
        self._attempt_ended(worker)
        try:
            if hello_ok.bulk is None:
                source = self._map(hello_ok.plane, layout)
            else:
                endpoint = bulk_endpoint(worker, hello_ok.bulk.port)
                self._sinks[session] = BulkSink(self._context, endpoint, layout, self._worker_keys[worker])
                self._loop.watch(self._sinks[session].sockets)
                source = Landing(layout)
        except ConfigError as error:
            return PlaneRefused(worker, hello_ok, str(error))
        self._sources[session] = KvSource(source, layout, self._converter(worker, hello_ok.profile))
        return PlaneOpened(worker, hello_ok)

    def _converter(self, worker: str, theirs: NodeProfile) -> KvConverter:
        """What becomes of that prefill node's KV here; told, because it may cost exactness and time."""
        ours = self._stack.core.settings.profile
        converter = import_converter(theirs, ours)
        if not converter.changes_nothing:
            self._log.info(
                LogEvent.KV_CONVERTED,
                peer=worker,
                source=describe_form(wire_form(theirs)),
                target=describe_form(engine_form(ours)),
            )
        return converter

    def _attempt_began(self, worker: str) -> None:
        """A HELLO goes out: the prefill node may look whether it shares our memory."""
        self._attempts.add(worker)
        if SHM in planes_of(self._config.kv_plane):
            self._probe.show()

    def _attempt_ended(self, worker: str) -> None:
        self._attempts.discard(worker)
        if not self._attempts:
            self._probe.hide()

    def _map(self, plane: ShmPlane, layout: KvLayout) -> SlabView:
        if layout.slot_bytes != plane.slot_bytes:
            raise ConfigError("the prefill node's slots are not as large as its profile says")
        return SlabView(plane.name, plane.slot_count, plane.slot_bytes)

    def _to_bulk(self, session: str, item: Any) -> list[Any]:
        match item:
            case SendFrame() if session in self._sinks:
                sent = self._sinks[session].send(item)
                return [] if sent else [FromBulk(session, RouteLost(item.route))]
            case ExpectChunks(slot=slot, epoch=epoch):
                self._sources[session].view.begin(slot, epoch)
            case Land(piece=piece):
                self._sources[session].view.land(piece, self._sinks[session].parts)
            case CloseBulk():
                sink = self._sinks.pop(session)
                self._loop.forget(sink.sockets)
                sink.close()
        return []

    def _to_worker(self, worker: str, item: Any, now_ms: int) -> list[Any]:
        match item:
            case OpenSocket(route=route):
                self._attempt_began(worker)
                link = DealerLink(self._context, worker, route, self._worker_keys[worker])
                self._workers[worker] = ControlPort(link, give_up_ms=self._config.dead_after_ms)
                self._loop.watch(link.sockets)
            case CloseSocket() if worker in self._workers:
                self._attempt_ended(worker)
                port = self._workers.pop(worker)
                self._loop.forget(port.link.sockets)
                port.close()
            case SendFrame() if worker in self._workers:
                lost = self._workers[worker].send(item, now_ms)
                return [] if lost is None else [FromWorker(worker, lost)]
        return []

    def _log_bad_frame(self, item: Any, peer: str) -> None:
        if isinstance(item, BadFrame):
            self._log.warning(LogEvent.PEER_PROTOCOL_ERROR, peer=peer, code=item.code, detail=item.detail)

    def flush(self, now_ms: int) -> list[Any]:
        events: list[Any] = list(self._clients.flush(now_ms))
        for worker, port in self._workers.items():
            events += [FromWorker(worker, lost) for lost in port.flush(now_ms)]
        return events

    def deadline_ms(self, now_ms: int) -> int | None:
        deadlines = [self._stack.deadline_ms(), self._clients.deadline_ms(now_ms)]
        deadlines += [port.deadline_ms(now_ms) for port in self._workers.values()]
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
            self._text.stop()
        self._probe.hide()
        for sink in self._sinks.values():
            sink.close()
        for port in (self._clients, *self._workers.values()):
            if port is not None:
                port.finish()
                port.close()
        # Last words, such as FAILED(ENGINE_HUNG), get the time that the sockets linger.
        self._context.term()
