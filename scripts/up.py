#!/usr/bin/env python
"""Start both nodes on this machine, and run them until Ctrl-C.

Decides nothing about jobs: it splits the CPUs, starts the daemons, prints one line when jobs are accepted,
shows what they warn of, and drains them at the first Ctrl-C; a second one kills them. If one of them ends by
itself, it says so with its last words, stops the other and exits non-zero: nothing is restarted silently.
"""

import argparse
import os
import signal
import socket
import sys
from types import FrameType

try:
    from common.clock import pause_ms
    from common.command_line import variable_of
    from common.config import flag_of
    from common.config_file import ConfigFile, read_config_file
    from common.errors import ConfigError, ExitStatus, TandemError
    from transport.launch.key_flags import value_of
    from transport.launch.pair import Pair
    from transport.launch.pair_plan import BACKENDS, PairPlan
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: run scripts/demo.sh once, then .venv/bin/python scripts/up.py")
except KeyboardInterrupt:
    sys.exit(6)

EXTRA = {
    "--prefill-args": "prefill_extra",
    "--decode-args": "decode_extra",
    "--gateway-args": "gateway",
}
HTTP_PORT = 8_000
TURN_MS = 50
EPILOG = """\
further flags for the daemons come last, after the name of the one they are for:
  up.py --prefetch-depth 2 --prefill-args --chunk-tokens 64 --decode-args --job-timeout-ms 60000
"""


class SecondSignal(Exception):
    """The person does not want to wait for the drain."""


class Launcher:
    """The pair, the signals, and what is shown of both."""

    def __init__(self, plan: PairPlan, log_level: str) -> None:
        self._plan = plan
        self._log_level = log_level
        self._signals = 0
        self._draining = False

    def run(self) -> int:
        """All phases; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        tell("starting the nodes; loading a model takes some seconds ...")
        self._pair = Pair(self._plan)
        try:
            self._serve()
        except (TandemError, OSError) as error:
            tell(f"up: {error}")
            self._stop("stopping what still runs ...")
            return ExitStatus.CONFIG if isinstance(error, ConfigError) else 1
        well = self._stop("draining: running jobs end first; Ctrl-C again kills both nodes")
        tell("both nodes have ended" if well else f"not all ended well; logs: {self._pair.directory.path}")
        return ExitStatus.OK if well else ExitStatus.DRAIN_INCOMPLETE

    def _serve(self) -> None:
        try:
            self._pair.wait_ready(self._turn)
            self._pair.announce()
            print(self._ready_line(), flush=True)
            if self._pair.gateway is not None:
                tell(f"open {self._pair.gateway.endpoint} in a browser to chat and to see both nodes at work")
            tell(
                'send a prompt from another terminal: .venv/bin/python scripts/send.py "Hello"; Ctrl-C stops'
            )
            while True:
                self._pair.check()
                self._turn()
                pause_ms(TURN_MS)
        except KeyboardInterrupt:
            return

    def _ready_line(self) -> str:
        pair = self._pair
        cpus = [",".join(map(str, cpus)) or "shared" for cpus in (pair.decode_cpus, pair.prefill_cpus)]
        return (
            f"ready: decode {pair.decode_endpoint} (CPU {cpus[0]}), "
            f"prefill {pair.prefill.endpoint} (CPU {cpus[1]}), prefetch {self._plan.depth or 'off'}"
        )

    def _stop(self, why: str) -> bool:
        tell(why)
        self._draining = True
        self._signals = 0 if self._signals < 2 else self._signals
        return self._pair.stop(self._turn, timeout_ms=None)

    def _turn(self) -> None:
        for daemon in self._pair.daemons:
            for line in daemon.new_lines(self._log_level):
                tell(line)
        if self._signals and self._draining:
            raise SecondSignal
        if self._signals:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def tell(text: str) -> None:
    """For the person, on stderr; a terminal that is gone must not stop the drain."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return


def parse_arguments(argv: list[str]) -> tuple[PairPlan, str]:
    """The plan and the level of what is shown. Raises ConfigError for a bad file."""
    own, extra = split_extra(argv)
    parser = make_parser()
    given = parser.parse_args(own)
    if given.prefetch_depth is not None and given.prefetch_depth < 1:
        parser.error("--prefetch-depth must be at least 1; use --no-prefetch to turn it off")
    path = os.environ.get(variable_of("config")) if given.config is None else given.config
    file = None if path is None else read_config_file(path)
    plan = PairPlan(
        kind=given.backend,
        model=given.model,
        max_tokens=given.max_tokens,
        prefetch_depth=0 if given.no_prefetch else given.prefetch_depth,
        lanes=given.slots,
        prefill_nodes=prefill_nodes_of(given, file),
        gateway=gateway_flags(given, file, extra.pop("gateway")),
        decode_endpoint=given.decode_endpoint,
        prefill_endpoint=given.prefill_endpoint,
        key_file=value_of(given.key_file, flag_of("key_file"), variable_of("key_file")),
        allowed_keys=value_of(given.allowed_keys, flag_of("allowed_keys"), variable_of("allowed_keys")),
        **extra,
    )
    if file is not None:
        plan = plan.with_file(file)
    return plan, "info" if given.verbose else "warning"


def prefill_nodes_of(given: argparse.Namespace, file: ConfigFile | None) -> int:
    """How many prefill nodes to start. Raises ConfigError."""
    told = {} if file is None else file.up
    unknown = sorted(set(told) - {"prefill-nodes"})
    if unknown:
        raise ConfigError(f"{file.path}: [up] {unknown[0]}: there is no such option; [up] has prefill-nodes")
    count = told.get("prefill-nodes", 1) if given.prefill_nodes is None else given.prefill_nodes
    if type(count) is not int or count < 1:
        raise ConfigError(f"prefill-nodes must be a whole number from 1 on, not {count!r}")
    return count


def gateway_flags(
    given: argparse.Namespace, file: ConfigFile | None, extra: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Flags of the gateway, None for no gateway. Without a word, its port is free: pairs do not clash."""
    if given.no_gateway:
        return None
    told = {} if file is None else dict(file.gateway)
    if given.http_port is not None:
        told["port"] = given.http_port
    told.setdefault("port", HTTP_PORT if is_free(HTTP_PORT) else 0)
    flags: list[str] = []
    for name, value in told.items():
        if value is not False:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return (*flags, *extra)


def is_free(port: int) -> bool:
    """Whether nobody listens at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def split_extra(argv: list[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The launcher's own words, and those for each daemon."""
    extra: dict[str, list[str]] = {name: [] for name in EXTRA.values()}
    own: list[str] = []
    target = own
    for word in argv:
        if word in EXTRA:
            target = extra[EXTRA[word]]
        else:
            target.append(word)
    return own, {name: tuple(words) for name, words in extra.items()}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Start a decode node and its prefill node on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML file with options of both nodes; flags beat it")
    add("--model", help="name or path of the model (default: the daemons')")
    add(
        "--backend",
        choices=BACKENDS,
        help="torch; emulated: no model, hashes instead; npu: emulated rngd and atom (default: torch)",
    )
    prefetch = parser.add_mutually_exclusive_group()
    prefetch.add_argument("--no-prefetch", action="store_true", help="one request at a time")
    prefetch.add_argument(
        "--prefetch-depth", type=int, metavar="N", help="queued requests to prefill ahead (default: 1)"
    )
    add("--slots", type=int, metavar="N", help="lanes: requests decoded at once (default: 1)")
    add("--prefill-nodes", type=int, metavar="N", help="prefill nodes to start (default: 1)")
    http = parser.add_mutually_exclusive_group()
    http.add_argument(
        "--http-port", type=int, metavar="PORT", help=f"of the gateway (default: {HTTP_PORT}, or a free one)"
    )
    http.add_argument("--no-gateway", action="store_true", help="no OpenAI-compatible HTTP, no page")
    add("--max-tokens", type=int, metavar="N", help="most tokens of prompt and answer together")
    add("--decode-endpoint", metavar="ENDPOINT", help="default: a socket that send.py finds")
    add("--prefill-endpoint", metavar="ENDPOINT", help="default: a private socket")
    for name, metavar, text in (
        ("key_file", "FILE", "secret key of both nodes, its public key beside it (made by keys.py)"),
        ("allowed_keys", "PATH", "public keys of who may send jobs: a file, or a directory of .pub files"),
    ):
        add(flag_of(name), metavar=metavar, help=text)
    add("--verbose", action="store_true", help="show the whole log, not only warnings")
    return parser


def main() -> int:
    """Exit status 0 after a drain, 1 when a node failed, 2 for a bad request, 6 when killed."""
    try:
        plan, log_level = parse_arguments(sys.argv[1:])
        return Launcher(plan, log_level).run()
    except ConfigError as error:
        tell(f"up: {error}")
        return ExitStatus.CONFIG
    except SecondSignal:
        tell("killed both nodes; running jobs are lost")
        return ExitStatus.ABORTED


if __name__ == "__main__":
    sys.exit(main())
