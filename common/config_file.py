"""The configuration file of a pair: TOML in, values of options out.

Decides what such a file may say: options by their flags' names, with dashes or underscores, for the prefill
node under `[prefill]`, for the decode node under `[decode]`, for both above the tables. All of that is
judged, whoever reads it, so that a mistake shows at the first start of either node. What stands under
`[gateway]` and `[up]` is for the launcher, which hands it on. Called by
`common/command_line.py` and by the launcher. It must never hold a default or a range of its own, nor judge a
value beyond its type: the configuration's constructor does.
"""

import difflib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from common.config import Flag, NodeConfig
from common.decode_config import DecodeConfig
from common.errors import ConfigError
from common.limits import CONFIG_FILE_BYTES
from common.prefill_config import PrefillConfig

LAUNCHERS = ("gateway", "up")
TABLES: dict[str, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
NOT_IN_A_FILE = {
    "config": "a configuration file cannot name another one",
}
NOT_FOR_BOTH = {"bind": "the nodes cannot share an address"}

_SHOWN_CHARACTERS = 40
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    list: "a list in brackets",
}


@dataclass(frozen=True, slots=True)
class FileValue:
    """What a file says about one option. place: where it stands, for people, as in `[decode] slots`."""

    value: Any
    place: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read and found to make sense. prefill, decode: values by field name.

    gateway, up: flags of the gateway and of `scripts/up.py`, by their names with dashes, as they stand there.
    """

    path: str
    prefill: Mapping[str, FileValue]
    decode: Mapping[str, FileValue]
    gateway: Mapping[str, Any] = field(default_factory=dict)
    up: Mapping[str, Any] = field(default_factory=dict)

    def of(self, config_class: type[NodeConfig]) -> Mapping[str, FileValue]:
        """What the file says to one of the nodes."""
        return self.prefill if config_class is PrefillConfig else self.decode


def read_config_file(path: str) -> ConfigFile:
    """Read and judge a file. Raises ConfigError that names file, key, fault and remedy."""
    document = _parse(path, _read(path))
    both: dict[str, FileValue] = {}
    tables: dict[str, dict[str, FileValue]] = {name: {} for name in TABLES}
    for_launcher: dict[str, dict[str, Any]] = {name: {} for name in LAUNCHERS}
    for key, value in document.items():
        if key in LAUNCHERS and isinstance(value, dict):
            for_launcher[key] = {name.replace("_", "-"): told for name, told in value.items()}
        elif key in (*TABLES, *LAUNCHERS):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {key} must be a table, written [{key}] on a line of its own")
            tables[key] = _values(path, key, value)
        elif isinstance(value, dict):
            raise ConfigError(f"{path}: there is no table [{key}]; {_nearest(key, TABLES, '[{}]')}")
        else:
            both |= _values(path, None, {key: value}, both)
    return ConfigFile(path, **{name: both | values for name, values in tables.items()}, **for_launcher)


def _read(path: str) -> str:
    if not path:
        raise ConfigError(
            "the name of the configuration file is empty; --config takes the path of a TOML file"
        )
    try:
        # Not a pipe or device, which may never end, or never begin.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"cannot read {path}: it is no regular file; --config takes a TOML file")
        with open(path, "rb") as file:
            content = file.read(CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; --config takes the path of a TOML file"
        ) from None
    if len(content) > CONFIG_FILE_BYTES:
        raise ConfigError(f"{path} has more than {CONFIG_FILE_BYTES} bytes; is it a configuration?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save it as UTF-8") from None


def _parse(path: str, text: str) -> dict[str, Any]:
    import tomllib  # only who has a file waits for it

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not TOML: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(
            f'{path}: not TOML: {error}; write options as in slots = 1 or model = "NAME", text in quotes'
        ) from None


def _values(
    path: str, table: str | None, entries: Mapping[str, Any], known: Mapping[str, FileValue] | None = None
) -> dict[str, FileValue]:
    """The options of one table, None for what stands above the tables, by field name."""
    values = dict(known or {})
    for key, value in entries.items():
        place = key if table is None else f"[{table}] {key}"
        name = key.replace("-", "_")
        _check_place(path, table, key, name, place)
        if name in values:
            raise ConfigError(f"{path}: {place}: given twice; dashes and underscores are the same")
        values[name] = FileValue(_typed(path, place, TABLES[table or "decode"], name, value), place)
    return values


def _check_place(path: str, table: str | None, key: str, name: str, place: str) -> None:
    """Raise ConfigError unless this option may stand in this table."""
    owners = [owner for owner, config_class in TABLES.items() if name in config_class.model_fields]
    if not owners:
        names = [option for owner in TABLES.values() for option in owner.model_fields]
        near = _nearest(name, sorted(set(names)), "{}", dashes="-" in key or "_" not in key)
        raise ConfigError(f"{path}: {place}: there is no such option; {near}")
    if name in NOT_IN_A_FILE:
        raise ConfigError(f"{path}: {place}: {NOT_IN_A_FILE[name]}; leave it out")
    if table is None and len(owners) == 1:
        raise ConfigError(
            f"{path}: {place}: an option of the {owners[0]} node alone; put it under [{owners[0]}]"
        )
    if table is None and name in NOT_FOR_BOTH:
        raise ConfigError(f"{path}: {place}: {NOT_FOR_BOTH[name]}; put it under [prefill] or [decode]")
    if table is not None and table not in owners:
        raise ConfigError(
            f"{path}: {place}: an option of the {owners[0]} node; put it under [{owners[0]}], or leave it out"
        )


def _nearest(word: str, known: Any, form: str, dashes: bool = False) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    if not found:
        names = ", ".join(f"[{name}]" for name in TABLES)
        return f"tables are {names}" if known is TABLES else "see --help for the names"
    return f"did you mean {form.format(found[0].replace('_', '-') if dashes else found[0])}?"


def _typed(path: str, place: str, config_class: type[NodeConfig], name: str, value: Any) -> Any:
    """The value if its type is one that the option takes. Raises ConfigError."""
    field = config_class.model_fields[name]
    look = next((item for item in field.metadata if isinstance(item, Flag)), None)
    if look is not None and look.bare is not None and isinstance(value, bool):
        return look.bare if value else None  # a flag that may stand alone can be true
    kinds = _kinds(field.annotation)
    if type(value) in kinds or (type(value) is int and float in kinds):
        return tuple(value) if isinstance(value, list) else value
    wanted = " or ".join(text for kind, text in _KINDS.items() if kind in kinds)
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    if isinstance(value, bool):
        shown = shown.lower()
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]} ..."
    raise ConfigError(f"{path}: {place}: must be {wanted}, not {shown}")


def _kinds(annotation: Any) -> set[type]:
    """The types of TOML values that a field takes, from its annotation."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(parts[0])
    if origin is Literal:
        return {str}
    if origin is tuple:
        return {list, str}  # as on the command line, or as a list
    if parts:
        return set().union(*map(_kinds, parts))
    return set() if annotation in (None, NoneType) else {annotation}
