"""The wiring of a decode node.

Decides which object talks to which: client port, worker port, slab mappings, compute and text threads, and
the stack. Run by `transport.daemon.Daemon` on the loop thread. It must never decide anything about jobs,
slots or sessions, and never compute.
"""

from collections.abc import Iterator
from typing import Any

from common.compatibility import profile_of
from common.config import DecodeConfig
from common.cpus import pin_process
from common.errors import ConfigError, ErrorCode, ExitStatus
from common.hooks import HoldPoints
from common.ids import new_incarnation, new_job_id, new_session_id
from common.kv_layout import KvLayout
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import Accepted, Failed, Finished, Rejected, Role
from decode_node import events as ev
from decode_node.compute import DecodeCompute, EngineFailed, EngineLoaded, ImportFrom
from decode_node.core import DecodeCore
from decode_node.scheduler import Route
from decode_node.settings import DecodeSettings
from decode_node.stack import DecodeStack, FromWorker, MapSlab, SlabMapped, SlabRefused, ToWorker
from decode_node.text_thread import TextThread, TokenizerFailed, TokenizerLoaded
from transport.connector import Connector
from transport.curve import denial_logger, with_denials
from transport.daemon import stall_bound_ms
from transport.key_files import connecting_keys, listening_keys
from transport.link import DealerLink, RouterLink
from transport.listener import Listener
from transport.loop import Loop, Mailbox
from transport.peers import BadFrame, CloseSocket, LivenessTimes, OpenSocket, SendFrame
from transport.port import ControlPort
from transport.slab import SlabView
from transport.zmq_sockets import new_context

_FOR_TEXT = (ev.PrepareSubmission, ev.PushTokens)
_FOR_COMPUTE = (ev.SampleFirst, ev.StartLocalPrefill, ev.StartDecode, ev.StopLane)
_COMPUTE_FIRST = (*_FOR_COMPUTE, ev.StartImport, ev.ForgetJob)


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
        self._mappings: dict[str, tuple[SlabView, KvLayout]] = {}
        self._loaded: dict[type, Any] = {}
        self._stack: DecodeStack | None = None

    def bind(self, loop: Loop) -> str:
        pin_process(self._config.cpus, self._log)
        config = self._config
        self._worker_keys = connecting_keys(config.key_file, config.server_key)
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
            if isinstance(item, (EngineFailed, TokenizerFailed)):
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
        settings = DecodeSettings(
            incarnation=self.incarnation,
            profile=profile_of(capabilities),
            token_bytes=capabilities.layout.token_bytes,
            lease_ms=config.lease_ms,
            dead_after_ms=config.dead_after_ms,
            stall_ms=stall_bound_ms(config.stall_ms, capabilities.longest_chunk_ms),
            drain_ms=config.drain_ms,
            max_queue=config.max_queue,
            prefill_timeout_ms=config.prefill_timeout_ms,
            prefill_wait_ms=config.prefill_wait_ms,
            job_timeout_ms=config.job_timeout_ms,
            prefill_retries=config.prefill_retries,
        )
        workers = () if config.pd_prefill_worker is None else (config.pd_prefill_worker,)
        route = Route(
            prefill_workers=workers,
            remote_only=config.pd_remote_only,
            backend=config.backend,
            slots=config.slots,
            prefetch_depth=config.prefetch_depth,
            on_prefill_failure=config.on_prefill_failure,
        )
        core = DecodeCore(settings, route, new_session_id, new_job_id)
        times = LivenessTimes(config.ping_ms, config.suspect_ms, config.dead_after_ms, config.lease_ms)
        # A name of its own towards prefill nodes: whoever knew it could end this node's sessions there, and
        # clients are shown the incarnation in STATUS.
        name = new_incarnation()
        connectors = {worker: Connector(times, name, Role.DECODE, settings.profile) for worker in workers}
        self._stack = DecodeStack(Listener(times, core.progress_count), connectors, core)

    def receive(self) -> Iterator[Any]:
        yield from self._mailbox.take()
        # What comes out may close one of them.
        for worker, port in list(self._workers.items()):
            for item in port.receive():
                self._log_bad_frame(item, worker)
                yield FromWorker(worker, item)
        for item in self._clients.receive():
            self._log_bad_frame(item, "client")
            yield item

    def step(self, event: Any, now_ms: int) -> list[Any]:
        # Compute's commands first: the lane waits for them, everybody else has time. Order is kept among
        # them, and among the rest.
        effects = self._stack.step(event, now_ms)
        return sorted(effects, key=lambda effect: not isinstance(effect, _COMPUTE_FIRST))

    def execute(self, effect: Any, now_ms: int) -> list[Any]:
        if isinstance(effect, SendFrame):
            self._log_answer(effect.message)
            lost = self._clients.send(with_denials(effect, self._clients.link.clients_denied), now_ms)
            return [] if lost is None else [lost]
        if isinstance(effect, ToWorker):
            return self._to_worker(effect.worker, effect.item, now_ms)
        if isinstance(effect, _FOR_TEXT):
            self._text.put(effect)
        elif isinstance(effect, _FOR_COMPUTE):
            self._compute.put(effect)
        else:
            return self._rare(effect)
        return []

    def _rare(self, effect: Any) -> list[Any]:
        match effect:
            case ev.ForgetJob():
                self._text.put(effect)
                if effect.known_to_compute:
                    self._compute.put(effect)
            case ev.StartImport(job_id=job_id, lane=lane, record=record, token_id=token_id):
                view, layout = self._mappings[effect.session]
                self._compute.put(ImportFrom(job_id, lane, view, layout, record, token_id))
            case MapSlab(worker=worker, hello_ok=hello_ok):
                return [self._map(worker, hello_ok)]
            case ev.UnmapSlab(session=session):
                self._mappings.pop(session, None)
            case ev.WorkerOpened(worker=worker, hello_ok=hello_ok):
                slots = len(hello_ok.grants)
                self._log.info(LogEvent.SESSION_OPENED, peer=worker, session=hello_ok.session, slots=slots)
                if slots < self._config.prefetch_depth:
                    self._log.warning(LogEvent.DEPTH_CLAMPED, asked=self._config.prefetch_depth, slots=slots)
            case ev.WorkerLost(worker=worker, session=session, cause=cause):
                self._log.info(LogEvent.SESSION_ENDED, peer=worker, session=session, cause=cause)
            case ev.ClientLost(session=session, cause=cause):
                self._log.info(LogEvent.SESSION_ENDED, peer="client", session=session, cause=cause)
            case ev.WorkerRefused(worker=worker, refusal=refusal):
                self._log.warning(LogEvent.HELLO_REFUSED, peer=worker, detail=refusal.detail)
            case ev.ReportEnd():
                self._log_end(effect)
            case ev.ExitNode(status=status, reason=reason):
                self.leaving = (status, reason)
        return []

    def _map(self, worker: str, hello_ok: Any) -> SlabMapped | SlabRefused:
        profile, plane = hello_ok.profile, hello_ok.plane
        layout = KvLayout(
            profile.layers, profile.kv_heads, profile.head_dim, profile.dtype, profile.max_tokens
        )
        if layout.slot_bytes != plane.slot_bytes:
            return SlabRefused(
                worker, hello_ok, "the prefill node's slots are not as large as its profile says"
            )
        try:
            view = SlabView(plane.name, plane.slot_count, plane.slot_bytes)
        except ConfigError as error:
            return SlabRefused(worker, hello_ok, str(error))
        self._mappings[hello_ok.session] = (view, layout)
        return SlabMapped(worker, hello_ok)

    def _to_worker(self, worker: str, item: Any, now_ms: int) -> list[Any]:
        match item:
            case OpenSocket(route=route):
                link = DealerLink(self._context, worker, route, self._worker_keys)
                self._workers[worker] = ControlPort(link, give_up_ms=self._config.dead_after_ms)
                self._loop.watch(link.sockets)
            case CloseSocket() if worker in self._workers:
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

    def _log_answer(self, message: Any) -> None:
        match message:
            case Accepted(job_id=job_id, prompt_tokens=tokens):
                self._log.info(LogEvent.JOB_ACCEPTED, job=job_id, prompt_tokens=tokens)
            case Rejected(code=code):
                # Not the detail, which is for the client: it may quote what the client sent.
                self._log.warning(LogEvent.JOB_REJECTED, code=code)

    def _log_end(self, end: ev.ReportEnd) -> None:
        match end.answer:
            case Finished(reason=reason, path=path, usage=usage, timings=timings):
                self._log.info(
                    LogEvent.JOB_FINISHED,
                    job=end.job_id,
                    reason=reason,
                    path=path,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    total_ms=timings.total_ms,
                    stages_ms=timings.stages_ms,
                )
            case Failed(code=code, detail=detail):
                self._log.info(LogEvent.JOB_FAILED, job=end.job_id, code=code, detail=detail)
            case None:
                self._log.info(
                    LogEvent.JOB_FAILED, job=end.job_id, code=ErrorCode.CLIENT_GONE, detail=end.cause
                )

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
        for port in (self._clients, *self._workers.values()):
            if port is not None:
                port.finish()
                port.close()
        # Last words, such as FAILED(ENGINE_HUNG), get the time that the sockets linger.
        self._context.term()
