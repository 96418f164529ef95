#!/usr/bin/env python
"""Show what a decode node and a prefill node are doing, again and again.

Decides which nodes are asked and how often; how it looks is `transport/launch/status_view.py`. Without
endpoints it finds the pair that scripts/up.py runs, else it looks at the daemons' default addresses, where
one node is enough. Exit status: 0, also after Ctrl-C; 1 when nobody answers at first, or, with --once, one
that was asked for by its endpoint; 2 when the request was wrong.
"""

import argparse
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

try:
    from rich.console import Console
    from rich.live import Live

    from common.clock import now_ms, pause_ms
    from common.config import NodeConfig
    from common.decode_config import DecodeConfig
    from common.endpoints import check_connect_endpoint
    from common.errors import ConfigError, ExitStatus, HandshakeRefused, NodeUnavailable
    from common.prefill_config import PrefillConfig
    from transport.client import Client
    from transport.key_files import ClientKeys
    from transport.launch.key_flags import add_key_flags, keys_of
    from transport.launch.run_directory import only_running_pair
    from transport.launch.status_view import NodeView, render
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: run scripts/demo.sh once, then .venv/bin/python scripts/status.py")
except KeyboardInterrupt:
    sys.exit(6)

CONFIGS: dict[str, type[NodeConfig]] = {"decode": DecodeConfig, "prefill": PrefillConfig}
ANSWER_MS = 1_000
REFUSED_MS = 200  # the next round asks again
TURN_MS = 100
INTERVAL_S_MAX = 3_600


class Watched:
    """One node, and what is known of it. asked_for: by its endpoint, so that its absence is a fault."""

    def __init__(self, name: str, endpoint: str, asked_for: bool, keys: ClientKeys | None) -> None:
        self.name = name
        self.endpoint = endpoint
        self.asked_for = asked_for
        self._keys = keys
        self.view = NodeView(name, endpoint, None)
        self._client: Client | None = None

    def ask(self) -> None:
        """Bring `view` up to date."""
        try:
            if self._client is None:
                self._client = Client(
                    self.endpoint, ANSWER_MS, refused_timeout_ms=REFUSED_MS, keys=self._keys
                )
            status = self._client.status(ANSWER_MS)
        except (NodeUnavailable, HandshakeRefused) as error:
            self.close()
            self.view = NodeView(self.name, self.endpoint, None, str(error))
            return
        self.view = NodeView(self.name, self.endpoint, status)

    def turn(self, timeout_ms: int) -> None:
        """Keep the session alive; it would cost the node a new one, and its log two lines, each round."""
        if self._client is None:
            pause_ms(timeout_ms)
        else:
            list(self._client.events(timeout_ms))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class Watch:
    """The nodes, the rounds, and what is printed."""

    def __init__(self, nodes: list[Watched], given: argparse.Namespace) -> None:
        self._nodes = nodes
        self._given = given
        self._stopping = False

    def run(self) -> int:
        """The exit status."""
        self._ask()
        answering = [node for node in self._nodes if node.view.status is not None]
        missing = [node for node in self._nodes if node.view.status is None]
        if not answering:
            for node in missing:
                tell(f"status: {node.name} node: {node.view.problem}")
            if not any(node.asked_for for node in missing):
                tell("status: start a pair with scripts/up.py, or name a node with --decode or --prefill")
            return 1
        self._nodes = [node for node in self._nodes if node.asked_for or node in answering]
        if self._given.json:
            self._repeat(lambda: print(json.dumps(self._plain()), flush=True))
        elif self._given.once:
            Console(highlight=False).print(self._picture())
        else:
            console = Console(highlight=False)
            with Live(self._picture(), console=console, auto_refresh=False) as live:
                self._repeat(lambda: live.update(self._picture(), refresh=True))
        return int(any(node.asked_for for node in missing)) if self._given.once else ExitStatus.OK

    def stop(self) -> None:
        """Let the round that goes on be the last one."""
        self._stopping = True

    def _repeat(self, show: Any) -> None:
        show()
        while not self._given.once:
            self._wait()
            if self._stopping:
                return
            self._ask()
            show()

    def _ask(self) -> None:
        for node in self._nodes:
            node.ask()

    def _wait(self) -> None:
        until_ms = now_ms() + int(self._given.interval * 1_000)
        while not self._stopping and (left_ms := until_ms - now_ms()) > 0:
            for node in self._nodes:
                node.turn(min(TURN_MS, left_ms) // len(self._nodes) + 1)

    def _picture(self) -> Any:
        return render([node.view for node in self._nodes])

    def _plain(self) -> dict[str, Any]:
        return {
            node.name: {
                "endpoint": node.endpoint,
                "problem": node.view.problem,
                "status": node.view.status,
            }
            for node in self._nodes
        }

    def close(self) -> None:
        for node in self._nodes:
            node.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show what both nodes are doing.", allow_abbrev=False)
    add = parser.add_argument
    add("--decode", metavar="ENDPOINT", help="a decode node (default: of the pair that up.py runs)")
    add("--prefill", metavar="ENDPOINT", help="a prefill node (default: likewise)")
    once = "ask once; the default where the output is no terminal, unless --json is given"
    add("--once", action="store_true", help=once)
    add("--json", action="store_true", help="one JSON object per round, with everything the nodes say")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between rounds (default: 1)")
    add_key_flags(parser)
    given = parser.parse_args()
    if not 0 < given.interval <= INTERVAL_S_MAX:
        parser.error(f"--interval must be more than 0 and at most {INTERVAL_S_MAX} seconds")
    given.once = given.once or not (given.json or sys.stdout.isatty())
    return given


def nodes_of(given: argparse.Namespace) -> list[Watched]:
    """Which nodes to ask. Raises ConfigError."""
    keys = keys_of(given)
    named = {name: getattr(given, name) for name in CONFIGS if getattr(given, name) is not None}
    if named:
        return [Watched(name, _checked(name, endpoint), True, keys) for name, endpoint in named.items()]
    pair = only_running_pair(
        lambda pair: f"--decode {pair.decode_endpoint} --prefill {pair.prefill_endpoint}"
    )
    if pair is None:
        found = {name: cls.model_fields["bind"].default for name, cls in CONFIGS.items()}
    else:
        found = {"decode": pair.decode_endpoint, "prefill": pair.prefill_endpoint}
    return [Watched(name, endpoint, False, keys) for name, endpoint in found.items() if endpoint]


def _checked(name: str, endpoint: str) -> str:
    try:
        return check_connect_endpoint(endpoint)
    except ValueError as error:
        raise ConfigError(f"--{name} {error}") from None


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop_on_signals(watch: Watch) -> None:
    """The first signal ends the watch between two rounds; the second one ends it wherever it is.

    An exception in the middle of anything, such as the making of a socket, can leave what nobody closes, and
    then the end waits for ever.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        watch.stop()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)


def main() -> int:
    """The exit status; errors are told without a traceback."""
    given = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    watch = None
    try:
        watch = Watch(nodes_of(given), given)
        stop_on_signals(watch)
        return watch.run()
    except ConfigError as error:
        tell(f"status: {error}")
        return ExitStatus.CONFIG
    except KeyboardInterrupt:
        return ExitStatus.OK
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.OK
    finally:
        if watch is not None:
            watch.close()


if __name__ == "__main__":
    sys.exit(main())
