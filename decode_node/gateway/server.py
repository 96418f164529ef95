"""The gateway process: its socket, its signals, its end.

Decides when the gateway is ready and how it stops: the first signal makes it unready at once, lets running
answers end within `--drain-ms`, and tells the others so; the second one ends the process. Called once, by
`__main__`, on the main thread. Its ready line means that requests are answered; whether the decode node is
there, /health/ready says.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import ExitStatus
from common.ids import new_incarnation
from common.log import NodeLog
from common.log_events import LogEvent
from decode_node.gateway.app import build
from decode_node.gateway.guard import Guard
from decode_node.gateway.options import Options
from decode_node.gateway.service import Service
from transport.key_files import ClientKeys

_LAST_WORDS_S = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Gateway:
    """One gateway, from its options to its exit status."""

    def __init__(
        self, options: Options, bound: socket.socket, api_keys: Sequence[bytes], keys: ClientKeys | None
    ) -> None:
        """bound: its listening socket. api_keys: digests. keys: for a decode node with keys."""
        self._options = options
        self._log = NodeLog(
            node="gateway",
            incarnation=new_incarnation(),
            level=options.log_level,
            form=options.log_form,
        )
        self._service = Service(
            options.decode,
            keys,
            served_model_name=options.served_model_name,
            max_queue=options.max_queue,
            keep_alive_ms=options.keep_alive_ms,
            log=self._log,
        )
        self._api_keys = api_keys
        self._socket = bound
        self._status = ExitStatus.OK
        self._stopping: asyncio.Event | None = None

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        connections: dict[Any, asyncio.BaseTransport] = {}
        self._service.abort_connection = lambda client: _abort(connections, client)
        self._service.hub.start()
        server = _Server(self._config(connections))
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        stopping = asyncio.create_task(self._stopping.wait())
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        # What was loaded stays: a full collection need not look at it, which takes tens of ms.
        gc.collect()
        gc.freeze()
        self._announce()
        await asyncio.wait({serving, stopping, self._service.hub.died}, return_when=asyncio.FIRST_COMPLETED)
        if self._service.hub.died.done():
            self._log.error(LogEvent.INVARIANT_VIOLATED, detail=self._service.hub.died.result())
            return ExitStatus.INVARIANT
        drained = await self._service.drain(self._options.drain_ms)
        self._status = ExitStatus.OK if drained else ExitStatus.DRAIN_INCOMPLETE
        server.should_exit = True
        await serving
        await self._service.hub.stop()
        self._log.info(LogEvent.NODE_STOPPED, status=int(self._status))
        self._log.close()
        return self._status

    def _config(self, connections: dict[Any, asyncio.BaseTransport]) -> uvicorn.Config:
        class Protocol(H11Protocol):
            """Remembers its connection, so that one whose client does not read can be ended."""

            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                connections[self.client] = transport

            def connection_lost(self, exc: Exception | None) -> None:
                connections.pop(self.client, None)
                super().connection_lost(exc)

        return uvicorn.Config(
            Guard(build(self._service), self._service, self._api_keys),
            http=Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )

    def _announce(self) -> None:
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        endpoint = f"http://{shown}:{port}"
        self._log.info(LogEvent.NODE_READY, endpoint=endpoint, decode=self._options.decode)
        line = {"ready": True, "role": "gateway", "endpoint": endpoint, "pid": os.getpid()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def _on_signal(self, number: signal.Signals) -> None:
        self._log.info(LogEvent.SIGNAL_RECEIVED, signal=signal.Signals(number).name)
        if self._service.draining:
            os._exit(ExitStatus.ABORTED)
        self._service.draining = True
        self._log.info(LogEvent.NODE_DRAINING)
        self._stopping.set()


class _Server(uvicorn.Server):
    """Leaves the signals to the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _abort(connections: dict[Any, asyncio.BaseTransport], client: Any) -> None:
    transport = connections.get(None if client is None else tuple(client))
    if transport is not None:
        # With what the kernel still holds for it.
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
