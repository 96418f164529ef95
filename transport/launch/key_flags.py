"""The keys of a client, as a person gives them to a script.

Decides the names of the flags, which are those of the daemons, and of the environment variables, which are
not: a person's own key must never become a node's because a launcher finds it in the environment. Used by
every script that talks to a node. It must never read a key file before the flags are known to be complete.
"""

import argparse
import os

from common.command_line import variable_of
from common.errors import ConfigError
from transport.key_files import ClientKeys, connecting_keys

_KEY_FILE, _SERVER_KEY = "--key-file", "--server-key"
CLIENT_VARIABLES = variable_of("client_key_file"), variable_of("client_server_key")


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Add --key-file and --server-key; `keys_of` looks at their environment variables."""
    keys = parser.add_argument_group("keys", "for a node that has some; scripts/keys.py makes them")
    for flag, variable, text in (
        (_KEY_FILE, CLIENT_VARIABLES[0], "your own secret key"),
        (_SERVER_KEY, CLIENT_VARIABLES[1], "public key of the node"),
    ):
        keys.add_argument(flag, metavar="FILE", help=f"{text} (environment: {variable})")


def keys_of(given: argparse.Namespace) -> ClientKeys | None:
    """The keys that the flags or the environment name, None without any. Raises ConfigError."""
    key_file = value_of(given.key_file, _KEY_FILE, CLIENT_VARIABLES[0])
    server_key = value_of(given.server_key, _SERVER_KEY, CLIENT_VARIABLES[1])
    if (key_file is None) != (server_key is None):
        raise ConfigError(
            f"{_KEY_FILE} and {_SERVER_KEY} go together: your secret, and the node's public key"
        )
    return connecting_keys(key_file, server_key)


def value_of(given: str | None, flag: str, variable: str) -> str | None:
    """What the flag was given, else its environment variable, else None. Raises ConfigError when empty."""
    value = os.environ.get(variable) if given is None else given
    if value is None or value.strip():
        return value
    if given is None:
        raise ConfigError(f"environment variable {variable} is empty; unset it or give it a value")
    raise ConfigError(f"{flag} is empty; leave it out or give it a value")
