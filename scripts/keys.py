#!/usr/bin/env python
"""Make and list the keys with which nodes and clients know each other.

    keys.py make NAME      a pair: NAME.key stays secret, NAME.pub goes to the other end of each connection
    keys.py allow FILE...  let the owners of these public keys connect to the node that runs here
    keys.py list           what there is

Decides nothing but the words; `transport/key_files.py` says what a key file is. A secret key is never shown.
Exit status: 0, or 2 when something is in the way.
"""

import argparse
import sys
from pathlib import Path

try:
    from common.errors import ConfigError, ExitStatus
    from transport.key_files import (
        PUBLIC_SUFFIX,
        SECRET_SUFFIX,
        allow_key,
        default_directory,
        make_key_pair,
        read_key_pair,
        read_public_key,
        read_public_keys,
    )
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: run scripts/demo.sh once, then .venv/bin/python scripts/keys.py")

ALLOWED = "allowed"


def make(given: argparse.Namespace) -> None:
    secret, public = make_key_pair(given.name, given.dir)
    allowed = given.dir / ALLOWED
    allowed.mkdir(mode=0o700, exist_ok=True)
    print(f"""\
{secret}: secret, stays here
{public}: public, goes to the other end of each connection

if {given.name} is a node:
  here:  --key-file {secret} --allowed-keys {allowed}
  there: copy {public.name} to whoever connects to it, for their --server-key
if {given.name} connects to a node:
  here:  --key-file {secret} --server-key FILE, the node's .pub
  there: copy {public.name} to the node's machine and run scripts/keys.py allow {public.name}""")


def allow(given: argparse.Namespace) -> None:
    for source in given.files:
        print(f"allowed: {allow_key(source, given.dir / ALLOWED)}")
    print(f"a node takes them from: --allowed-keys {given.dir / ALLOWED}")


def show(given: argparse.Namespace) -> None:
    """Names and public keys; a file that is not as it should be is named with its fault."""
    if not given.dir.is_dir():
        raise ConfigError(f"{given.dir} does not exist: keys.py make NAME makes it")
    allowed = given.dir / ALLOWED
    names = read_public_keys(allowed) if allowed.is_dir() else {}
    for path in sorted(given.dir.glob("*" + PUBLIC_SUFFIX)):
        key, secret = read_public_key(path), path.with_suffix(SECRET_SUFFIX)
        if secret.exists() and read_key_pair(secret).public != key:
            raise ConfigError(f"{path} does not belong to {secret.name}: make both anew under another name")
        print(f"{path.stem}  {key.decode()}  {'own' if secret.exists() else 'public key alone'}")
    for name in sorted(names.values()):
        print(f"{name}  allowed")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make and list keys of nodes and clients.",
        epilog="To take a permission back, remove the file from the directory of allowed keys; sessions that "
        "are open go on until they end.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--dir",
        type=Path,
        default=default_directory(),
        metavar="DIR",
        help=f"where keys lie (default: {default_directory()})",
    )
    command = commands.add_parser("make", parents=[shared], help="make a pair of keys")
    command.add_argument("name", metavar="NAME", help="of the node or client that will own them")
    command.set_defaults(run=make)
    command = commands.add_parser("allow", parents=[shared], help="let somebody connect to the node here")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a public key: NAME.pub")
    command.set_defaults(run=allow)
    command = commands.add_parser("list", parents=[shared], help="show names and public keys")
    command.set_defaults(run=show)
    return parser.parse_args()


def main() -> int:
    given = parse_arguments()
    try:
        given.run(given)
    except ConfigError as error:
        print(f"keys: {error}", file=sys.stderr)
        return ExitStatus.CONFIG
    return ExitStatus.OK


if __name__ == "__main__":
    sys.exit(main())
