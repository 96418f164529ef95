"""The keys of a client, as a person gives them to a script.

Decides the names of the flags and of the environment variables, which are those of the daemons. Used by every
script that talks to a node. It must never read a key file before the flags are known to be complete.
"""

import argparse
import os

from common.command_line import variable_of
from common.errors import ConfigError
from transport.key_files import ClientKeys, connecting_keys

_KEY_FILE, _SERVER_KEY = "--key-file", "--server-key"


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Add --key-file and --server-key, with their environment variables as defaults."""
    keys = parser.add_argument_group("keys", "for a node that has some; scripts/keys.py makes them")
    keys.add_argument(
        _KEY_FILE,
        metavar="FILE",
        default=os.environ.get(variable_of("key_file")),
        help=f"your own secret key (environment: {variable_of('key_file')})",
    )
    keys.add_argument(
        _SERVER_KEY,
        metavar="FILE",
        default=os.environ.get(variable_of("server_key")),
        help=f"public key of the node (environment: {variable_of('server_key')})",
    )


def keys_of(given: argparse.Namespace) -> ClientKeys | None:
    """The keys that the flags name, None without any. Raises ConfigError."""
    if (given.key_file is None) != (given.server_key is None):
        raise ConfigError(
            f"{_KEY_FILE} and {_SERVER_KEY} go together: your secret, and the node's public key"
        )
    return connecting_keys(given.key_file, given.server_key)
