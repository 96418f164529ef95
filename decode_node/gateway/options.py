"""The gateway's command line and environment.

Decides its flags, their defaults and ranges. Each flag has an environment variable, `TANDEM_GATEWAY_` and its
name, which counts when the flag is not given. It must never import what makes `--help` wait, nor read a key
file before all flags are known to be right.
"""

import argparse
import difflib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from common.decode_config import DecodeConfig
from common.endpoints import check_connect_endpoint
from common.errors import ConfigError, ExitStatus
from common.limits import JOBS_PER_CLIENT
from common.version import VERSION

PREFIX = "TANDEM_GATEWAY_"
_DURATION_MS_MAX = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Options:
    """What a gateway is started with."""

    decode: str
    host: str
    port: int
    api_key_file: str | None
    allow_anyone: bool
    served_model_name: str | None
    max_queue: int
    drain_ms: int
    keep_alive_ms: int
    key_file: str | None
    server_key: str | None
    log_level: str
    log_form: str


_DEFAULTS: dict[str, Any] = {
    "decode": DecodeConfig.model_fields["bind"].default,
    "host": "127.0.0.1",
    "port": 8_000,
    "api_key_file": None,
    "allow_anyone": False,
    "served_model_name": None,
    "max_queue": 1_024,
    "drain_ms": 30_000,
    "keep_alive_ms": 5_000,
    "key_file": None,
    "server_key": None,
    "log_level": "info",
    "log_form": "auto",
}
_TEXTS = {
    "decode": ("ENDPOINT", "the decode node"),
    "host": ("HOST", "address to listen at; one that is not loopback needs --api-key-file or --allow-anyone"),
    "port": ("PORT", "port to listen at; 0 lets the system choose"),
    "api_key_file": ("FILE", "API keys, one on each line; without, everybody who can connect is served"),
    "allow_anyone": (None, "listen at any address without API keys; as a variable, yes or no"),
    "served_model_name": ("NAME", "the model's name in the API"),
    "max_queue": ("N", "most jobs under way through this gateway; further ones are answered 429"),
    "drain_ms": ("MS", "time for running answers to end after the first signal, in ms"),
    "keep_alive_ms": ("MS", "silence after which a stream gets a comment, in ms"),
    "key_file": ("FILE", "this gateway's secret key, for a decode node with keys"),
    "server_key": ("FILE", "public key of the decode node"),
    "log_level": ("LEVEL", "debug, info, warning or error"),
    "log_form": ("FORM", "json, text, or auto for text on a terminal"),
}
_UNSET = {"served_model_name": "the decode node's", "allow_anyone": "no"}
_RANGES = {
    "port": (0, 65_535),
    "max_queue": (1, JOBS_PER_CLIENT),
    "drain_ms": (1, _DURATION_MS_MAX),
    "keep_alive_ms": (100, _DURATION_MS_MAX),
}
_CHOICES = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_form": ("auto", "json", "text"),
    "allow_anyone": ("yes", "no"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitStatus.CONFIG, f"{self.prog}: error: {message}\n{self.prog}: see --help\n")


def parse(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Options:
    """The options. environment: None is this process's. A usage error is one line and exit status 2."""
    parser = _Parser(
        prog="python -m decode_node.gateway",
        description="An OpenAI-compatible HTTP gateway to a Tandem decode node.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gateway {VERSION}")
    for name, (metavar, text) in _TEXTS.items():
        default = _UNSET.get(name, "none" if _DEFAULTS[name] is None else _DEFAULTS[name])
        explanation = f"{text} (default: {default}; environment: {variable_of(name)})"
        # A flag without a value counts as its variable's "yes".
        kind = {"metavar": metavar} if metavar else {"action": "store_const", "const": "yes"}
        parser.add_argument(flag_of(name), dest=name, help=explanation, **kind)
    given = vars(parser.parse_args(argv))
    try:
        return _checked(given, os.environ if environment is None else environment)
    except ConfigError as error:
        parser.error(str(error))


def flag_of(name: str) -> str:
    """The command line's name of an option."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment's name of an option."""
    return PREFIX + name.upper()


def _checked(given: dict[str, str], environment: Mapping[str, str]) -> Options:
    known = {variable_of(field.name): field.name for field in fields(Options)}
    values = dict(given)
    places = {name: flag_of(name) for name in known.values()}
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        if variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see --help for the names"
            raise ConfigError(f"environment variable {variable}: there is no such option; {hint}")
        if known[variable] not in values:
            values[known[variable]] = environment[variable]
            places[known[variable]] = f"environment variable {variable}"
    read = {name: _read(name, text, places[name]) for name, text in values.items()}
    options = Options(**{**_DEFAULTS, **read})
    _check_together(options)
    return options


def _read(name: str, text: str, place: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{place} is empty; leave it out or give it a value")
    if name in _CHOICES and text not in _CHOICES[name]:
        raise ConfigError(f"{place}: must be one of {', '.join(_CHOICES[name])}, not {text!r}")
    if name == "allow_anyone":
        return text == "yes"
    if name in _RANGES:
        low, high = _RANGES[name]
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ConfigError(f"{place}: must be a whole number from {low} to {high}, not {text!r}")
        return int(text)
    if name == "decode":
        try:
            return check_connect_endpoint(text)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from None
    return text


def _check_together(options: Options) -> None:
    if (options.key_file is None) != (options.server_key is None):
        raise ConfigError("--key-file and --server-key go together: your secret, and the node's public key")
    if options.allow_anyone and options.api_key_file is not None:
        raise ConfigError("--allow-anyone and --api-key-file exclude each other")
    if options.api_key_file is None and not options.allow_anyone and not _is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host}: everybody who can connect could use the model; write keys into a file,"
            " one on each line, and give --api-key-file FILE; or listen at 127.0.0.1 behind an SSH tunnel;"
            " --allow-anyone says that this is meant"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
