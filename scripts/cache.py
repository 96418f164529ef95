#!/usr/bin/env python
"""Save the prefix cache of a running decode node, load one that was saved, or describe such a file.

Decides how an order is given and its answer shown. The node itself writes and reads, in the directory of its
--prefix-cache-dir; `info` reads any file, without a node. Without --endpoint it finds the pair that
scripts/up.py runs. Exit status: 0 when it was done, 1 when the node said no or cannot be reached, 2 when the
request or the file was wrong, 6 when interrupted, which does not stop the node.
"""

import argparse
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

try:
    from rich.console import Console

    from common.decode_config import DecodeConfig
    from common.endpoints import check_connect_endpoint
    from common.errors import ConfigError, ExitStatus, NodeUnavailable, TandemError
    from common.prefix_file import info
    from transport.client import REFUSED_TIMEOUT_MS, Client
    from transport.launch.key_flags import add_key_flags, keys_of
    from transport.launch.run_directory import only_running_pair
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: run scripts/demo.sh once, then .venv/bin/python scripts/cache.py")
except KeyboardInterrupt:
    sys.exit(6)

ORDER_MS = 600_000
DONE = {"save": "saved", "load": "loaded"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Save or load a prefix cache.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="save|load|info")
    for action, text in (
        ("save", "write the decode node's prefix cache to a file in its --prefix-cache-dir"),
        ("load", "read such a file back, as far as the cache has room"),
    ):
        command = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        command.add_argument("file", metavar="NAME", help="name of the file, without a directory")
        command.add_argument("--endpoint", help="the decode node (default: the pair that up.py runs)")
        add_key_flags(command)
    text = "say what a saved file is, without a node"
    command = actions.add_parser("info", help=text, description=text, allow_abbrev=False)
    command.add_argument("file", type=Path, metavar="FILE", help="path of a saved file")
    return parser.parse_args()


def endpoint_of(given: argparse.Namespace) -> str:
    """The decode node. Raises ConfigError."""
    if given.endpoint is not None:
        try:
            return check_connect_endpoint(given.endpoint)
        except ValueError as error:
            raise ConfigError(f"--endpoint {error}") from None
    pair = only_running_pair(lambda pair: f"--endpoint {pair.decode_endpoint}")
    return DecodeConfig.model_fields["bind"].default if pair is None else pair.decode_endpoint


def order(given: argparse.Namespace) -> int:
    """Have the node save or load; the exit status."""
    keys = keys_of(given)
    client = Client(endpoint_of(given), refused_timeout_ms=REFUSED_TIMEOUT_MS, keys=keys)
    with client, _progress(f"the decode node {given.action}s its prefix cache"):
        reply = client.order_cache(given.action, given.file, ORDER_MS)
    if reply.code is not None:
        tell(f"cache: {reply.code}: {reply.detail}")
        return 1
    size_mib = reply.size_bytes / 2**20
    print(f"{DONE[given.action]} {reply.blocks} blocks: {reply.path}, {size_mib:.1f} MiB")
    return ExitStatus.OK


def _progress(text: str) -> Any:
    return Console(stderr=True).status(text) if sys.stderr.isatty() else nullcontext()


def describe(path: Path) -> int:
    """Print what the header of a file says; the exit status."""
    found = info(path)
    tokens = found.block_count * found.identity.block_tokens
    print(f"{path}: {found.block_count} blocks, {tokens} tokens, {found.size_bytes / 2**20:.1f} MiB")
    for name, value in asdict(found.identity).items():
        print(f"  {name}: {value}")
    return ExitStatus.OK


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """The exit status; errors are told without a traceback."""
    given = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return describe(given.file) if given.action == "info" else order(given)
    except ConfigError as error:
        tell(f"cache: {error}")
        return ExitStatus.CONFIG
    except NodeUnavailable as error:
        tell(
            f"cache: {error}\ncache: start a pair with scripts/up.py, or name the decode node with --endpoint"
        )
        return 1
    except TandemError as error:
        tell(f"cache: {error}")
        return 1
    except KeyboardInterrupt:
        tell("cache: interrupted; a node that has begun goes on")
        return ExitStatus.ABORTED


if __name__ == "__main__":
    sys.exit(main())
