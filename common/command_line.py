"""The command line and environment of a daemon, built from its configuration model.

Decides how the fields of `common/config.py` are written by a person: `--slots 2` and `TANDEM_SLOTS=2` are the
field `slots`, and so is `slots = 2` in a file (`common/config_file.py`). Called first thing by both daemons.
It must never hold a default or a range of its own, nor
import anything that makes `--help` wait.

Environment: a variable `TANDEM_<FLAG>` is read when its flag is not given. A variable of the other daemon is
ignored, so that both can share an environment, and so is `TANDEM_CACHE`, which says where models lie. Any
other `TANDEM_` name, and a variable that is set but empty, is an error: a misspelt or forgotten value must
not pass for a default.
"""

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config import Flag, NodeConfig, flag_of
from common.config_file import read_config_file
from common.decode_config import DecodeConfig
from common.errors import ConfigError, ExitStatus
from common.prefill_config import PrefillConfig

ENVIRONMENT_PREFIX = "TANDEM_"
NOT_OPTIONS = frozenset(
    {"TANDEM_CACHE", "TANDEM_CLIENT_KEY_FILE", "TANDEM_CLIENT_SERVER_KEY", "TANDEM_API_KEY"}
)
GATEWAY_PREFIX = ENVIRONMENT_PREFIX + "GATEWAY_"

Config = TypeVar("Config", bound=NodeConfig)


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    version: str,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration that `argv` (without the program's name) and the environment ask for.

    environment: None is this process's. A usage error is one line on stderr and exit status 2.
    """
    parser = _parser(config_class, version)
    flags = vars(parser.parse_args(argv))
    try:
        variables = _environment_values(config_class, os.environ if environment is None else environment)
        return _construct(config_class, flags, variables)
    except ConfigError as error:
        parser.error(str(error))


def variable_of(field_name: str) -> str:
    """The environment's name of a field."""
    return ENVIRONMENT_PREFIX + field_name.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The usage of thirty flags would bury the one line that matters.
        self.exit(ExitStatus.CONFIG, f"{self.prog}: error: {message}\n{self.prog}: see --help\n")


def _parser(config_class: type[NodeConfig], version: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m {config_class.program}",
        description=f"Tandem {config_class.program.replace('_', ' ')}.",
        epilog="A flag that is not given is taken from its environment variable, then from the file of "
        "--config, then from its default.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{config_class.program} {version}")
    for name, field in config_class.model_fields.items():
        _add_flag(parser, name, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    is_switch = field.annotation is bool
    look = Flag("") if is_switch else _look(field)
    default = ("on" if field.default else "off") if is_switch else field.default
    default = look.unset if default in (None, ()) else default
    explanation = f"{field.description} (default: {default}; environment: {variable_of(name)})"
    arguments: dict[str, Any] = {"dest": name, "help": explanation.replace("%", "%%")}
    if is_switch:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments["metavar"] = look.metavar
    if look.bare is not None:
        arguments |= {"nargs": "?", "const": look.bare}
    parser.add_argument(flag_of(name), **arguments)


def _look(field: FieldInfo) -> Flag:
    if get_origin(field.annotation) is Literal:
        return Flag("|".join(get_args(field.annotation)))
    return next(item for item in field.metadata if isinstance(item, Flag))


def _environment_values(config_class: type[NodeConfig], environment: Mapping[str, str]) -> dict[str, str]:
    fields = PrefillConfig.model_fields | DecodeConfig.model_fields
    known = {variable_of(name): name for name in fields}
    values = {}
    ours = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    ours -= {name for name in ours if name.startswith(GATEWAY_PREFIX)}
    for variable in sorted(ours - NOT_OPTIONS):
        if variable not in known:
            nearest = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see --help for the names"
            raise ConfigError(f"environment variable {variable}: there is no such option; {hint}")
        if known[variable] in config_class.model_fields:
            values[known[variable]] = environment[variable]
    return values


def _construct(
    config_class: type[Config], flags: Mapping[str, object], variables: Mapping[str, str]
) -> Config:
    values: dict[str, object] = dict(flags)
    origins: dict[str, str] = {}
    for name, text in variables.items():
        if name not in flags:
            if not text.strip():
                raise ConfigError(
                    f"environment variable {variable_of(name)} is empty; unset it or give it a value"
                )
            values[name] = text
            origins[name] = f"the environment: {variable_of(name)}"
    path = values.get("config")
    if path is not None:
        for name, entry in read_config_file(str(path)).of(config_class).items():
            if name not in values:
                values[name] = entry.value
                origins[name] = f"{path}: {entry.place}"
    return config_class(origins=origins, **values)
