"""The wiring of a prefill node.

Decides which object talks to which: listener port, slab, compute thread and stack. Run by
`transport.daemon.Daemon` on the loop thread. It must never decide anything about slots or sessions, and never
compute.
"""

from collections.abc import Iterator
from typing import Any

from common.compatibility import profile_of
from common.config import PrefillConfig
from common.cpus import pin_process
from common.errors import ConfigError, ErrorCode, ExitStatus
from common.hooks import HoldPoints
from common.ids import new_session_id
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import PrefillDone, PrefillFailed, ShmPlane
from prefill_node import events as ev
from prefill_node.compute import EngineFailed, EngineLoaded, PrefillCompute
from prefill_node.core import PrefillCore
from prefill_node.production import PrefillSettings
from prefill_node.stack import PrefillStack
from transport.curve import denial_logger, with_denials
from transport.daemon import stall_bound_ms
from transport.key_files import listening_keys
from transport.link import RouterLink
from transport.listener import Listener
from transport.loop import Loop, Mailbox
from transport.peers import BadFrame, LivenessTimes, SendFrame
from transport.port import ControlPort
from transport.slab import Slab, remove_stale_slabs
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
        self._stack: PrefillStack | None = None

    def bind(self, loop: Loop) -> str:
        pin_process(self._config.cpus, self._log)
        for name in remove_stale_slabs():
            self._log.info(LogEvent.SLAB_REMOVED, slab=name)
        config = self._config
        keys = listening_keys(config.key_file, config.allowed_keys)
        link = RouterLink(self._context, config.bind, keys, denial_logger(self._log))
        self._port = ControlPort(link, give_up_ms=self._config.lease_ms)
        self._loop = loop
        self._mailbox = Mailbox(loop.wakeup)
        self._compute = PrefillCompute(self._config.engine_settings(), self._mailbox, self._hooks, self._log)
        self._log.info(LogEvent.NODE_LOADING, backend=self._config.backend, model=self._config.model)
        self._compute.start()
        return link.endpoint

    def load(self) -> bool:
        for item in self._mailbox.take():
            if isinstance(item, EngineFailed):
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
        self._slab = Slab(config.source_slots, layout.slot_bytes)
        self._compute.attach(self._slab, layout)
        stall_ms = stall_bound_ms(config.stall_ms, capabilities.longest_chunk_ms)
        settings = PrefillSettings(
            incarnation=self.incarnation,
            profile=profile_of(capabilities),
            plane=ShmPlane(self._slab.name, config.source_slots, layout.slot_bytes),
            token_bytes=layout.token_bytes,
            lease_ms=config.lease_ms,
            stall_ms=stall_ms,
            drain_ms=config.drain_ms,
            # One decode node, which is granted the whole slab.
            decode_nodes=1,
            slots_per_session=config.source_slots,
        )
        core = PrefillCore(settings, new_session_id)
        times = LivenessTimes(config.ping_ms, config.suspect_ms, config.dead_after_ms, config.lease_ms)
        self._stack = PrefillStack(Listener(times, core.progress_count), core)

    def receive(self) -> Iterator[Any]:
        yield from self._mailbox.take()
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
            case ev.RunChunk():
                self._compute.put(effect)
            case ev.SessionLost():
                self._log.info(LogEvent.SESSION_ENDED, session=effect.session, cause=effect.cause)
            case ev.ExitNode(status=status, reason=reason):
                self.leaving = (status, reason)
        return []

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
        return self._port.flush(now_ms)

    def deadline_ms(self, now_ms: int) -> int | None:
        deadlines = (self._stack.deadline_ms(), self._port.deadline_ms(now_ms))
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
        if self._port is not None:
            self._port.finish()
            self._port.close()
        if self._slab is not None:
            self._slab.unlink()
        # Last words, such as FAILED(ENGINE_HUNG), get the time that the sockets linger.
        self._context.term()
