"""The configuration file: what it may say, what beats it, and what a person reads who wrote another."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.command_line import parse
from common.config import NodeConfig
from common.config_file import read_config_file
from common.decode_config import DecodeConfig
from common.errors import ConfigError
from common.limits import CONFIG_FILE_BYTES
from common.prefill_config import PrefillConfig
from transport.launch.pair_plan import PairPlan

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "pair.toml"
REFUSE_AND_REPORT = """
import json, resource, sys
from {program}.__main__ import main
try:
    main()
except SystemExit as refusal:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    heavy = sorted({{"torch", "transformers", "zmq"}} & sys.modules.keys())
    print(json.dumps([refusal.code, heavy, usage.ru_utime + usage.ru_stime]))
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], str]:
    """Writes a file and returns its path."""

    def write_file(content: str | bytes) -> str:
        path = tmp_path / "pair.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def parsed(
    *argv: str, environment: Mapping[str, str] | None = None, config_class: type[NodeConfig] = DecodeConfig
) -> Any:
    return parse(config_class, argv, "9.9", environment or {})


def test_one_file_configures_both_nodes_with_dashes_or_underscores(write: Callable[..., str]) -> None:
    path = write("max-tokens = 64\nping_ms = 90\n[prefill]\nsource-slots = 3\n[decode]\nmax_queue = 7\n")
    prefill = parsed("--config", path, config_class=PrefillConfig)
    decode = parsed("--config", path)
    assert (prefill.max_tokens, prefill.ping_ms, prefill.source_slots) == (64, 90, 3)
    assert (decode.max_tokens, decode.ping_ms, decode.max_queue) == (64, 90, 7)


def test_flag_beats_environment_beats_file_beats_default(write: Callable[..., str]) -> None:
    path = write("ping-ms = 1\ndrain-ms = 2\nlease-ms = 9_000\n")
    environment = {"TANDEM_PING_MS": "3", "TANDEM_DRAIN_MS": "4"}
    config = parsed("--config", path, "--ping-ms", "5", environment=environment)
    assert (config.ping_ms, config.drain_ms, config.lease_ms, config.suspect_ms) == (5, 4, 9_000, 1_500)


def test_a_nodes_own_table_beats_what_stands_above(write: Callable[..., str]) -> None:
    path = write("max-tokens = 64\n[decode]\nmax-tokens = 32\n")
    assert parsed("--config", path).max_tokens == 32
    assert parsed("--config", path, config_class=PrefillConfig).max_tokens == 64


def test_the_environment_may_name_the_file(write: Callable[..., str]) -> None:
    path = write("ping-ms = 77\n")
    assert parsed(environment={"TANDEM_CONFIG": path}).ping_ms == 77
    assert parsed("--config", write("ping-ms = 78\n"), environment={"TANDEM_CONFIG": "/none"}).ping_ms == 78


def test_a_flag_that_may_stand_alone_is_true_or_false_or_a_number(write: Callable[..., str]) -> None:
    route = '[decode]\npd-prefill-worker = "ipc:///p"\npd-remote-only = true\npd-prefetch-next = '
    assert parsed("--config", write(f"{route}true")).prefetch_depth == 1
    assert parsed("--config", write(f"{route}3")).prefetch_depth == 3
    assert parsed("--config", write(f"{route}false")).prefetch_depth == 0
    assert parsed("--config", write(f"{route}3"), "--pd-prefetch-next", "off").prefetch_depth == 0


def test_a_list_is_written_as_a_flag_or_as_a_list(write: Callable[..., str]) -> None:
    cpu = min(os.sched_getaffinity(0))
    assert parsed("--config", write(f"cpus = [{cpu}]")).cpus == (cpu,)
    assert parsed("--config", write(f'cpus = "{cpu}"')).cpus == (cpu,)


def test_whole_numbers_are_numbers(write: Callable[..., str]) -> None:
    assert parsed("--config", write("emulated-decode-ms = 2")).emulated_decode_ms == 2.0


def test_each_value_that_is_no_default_says_where_it_comes_from(write: Callable[..., str]) -> None:
    path = write("ping-ms = 90\nlease-ms = 5_000\n[decode]\nmax_queue = 7\n")
    config = parsed("--config", path, "--drain-ms", "1", environment={"TANDEM_MODEL": "m"})
    assert config.origins == {
        "config": "flag",
        "drain_ms": "flag",
        "model": "the environment: TANDEM_MODEL",
        "ping_ms": f"{path}: ping-ms",
        "max_queue": f"{path}: [decode] max_queue",
    }


@pytest.mark.parametrize(
    ("text", "fault", "remedy"),
    [
        ("[decode]\nslot = 1", "[decode] slot: there is no such option", "did you mean slots?"),
        ("[decode]\nmax_queu = 1", "[decode] max_queu: there is no such option", "did you mean max_queue?"),
        ("[decode]\nzebra = 1", "[decode] zebra: there is no such option", "see --help"),
        ("[decod]\nslots = 1", "there is no table [decod]", "did you mean [decode]?"),
        ("[zebra]", "there is no table [zebra]", "tables are [prefill], [decode]"),
        ("decode = 1", "decode must be a table", "written [decode]"),
        ("[[decode]]\nslots = 1", "decode must be a table", "written [decode]"),
        ("slots = 1", "slots: an option of the decode node alone", "put it under [decode]"),
        ("[prefill]\nslots = 1", "[prefill] slots: an option of the decode node", "put it under [decode]"),
        ('bind = "ipc:///x"', "bind: the nodes cannot share an address", "[prefill] or [decode]"),
        ('config = "x"', "config: a configuration file cannot name another one", "leave it out"),
        ("ping-ms = 1\nping_ms = 1", "ping_ms: given twice", "dashes and underscores are the same"),
        ('[decode]\nslots = "1"', '[decode] slots: must be a whole number, not "1"', ""),
        ("[decode]\nslots = true", "[decode] slots: must be a whole number, not true", ""),
        ("[decode]\nslots = 1.0", "[decode] slots: must be a whole number, not 1.0", ""),
        ("[decode]\nslots.n = 1", "[decode] slots: must be a whole number, not {'n': 1}", ""),
        ("[decode]\npd-remote-only = 1", "pd-remote-only: must be true or false, not 1", ""),
        ("model = 1999-12-31", "model: must be text in quotes, not datetime.date(1999", ""),
        ("dtype = 32", "dtype: must be text in quotes, not 32", ""),
        ("cpus = 1", "cpus: must be text in quotes or a list in brackets, not 1", ""),
        ("emulated-decode-ms = 'x'", 'emulated-decode-ms: must be a number, not "x"', ""),
        ("model = torch", "not TOML: Invalid value (at line 1, column 9)", "text in quotes"),
        ("\n[decode\n", "not TOML: Expected ']' at the end of a table declaration (at line 2,", ""),
        ("[decode]\nslots = 1\nslots = 1\n", "not TOML: Cannot overwrite a value (at line 3,", ""),
        (f"a = {'[' * 5_000}", "not TOML: nested too deeply", ""),
        (b"ping-ms = 1\n# \xff", "line 2: not UTF-8", "save it as UTF-8"),
        (b"#" * (CONFIG_FILE_BYTES + 1), f"more than {CONFIG_FILE_BYTES} bytes", ""),
    ],
)
@pytest.mark.parametrize("config_class", [PrefillConfig, DecodeConfig])
def test_a_bad_file_is_refused_by_both_nodes_with_place_fault_and_remedy(
    write: Callable[..., str],
    config_class: type[NodeConfig],
    text: str | bytes,
    fault: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(text)
    with pytest.raises(SystemExit) as refusal:
        parsed("--config", path, config_class=config_class)
    told = capsys.readouterr().err
    assert refusal.value.code == 2
    assert path in told
    assert fault in told
    assert remedy in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[decode]\nslots = 400", "--slots 400: backend torch decodes 256 requests at once"),
        ('dtype = "float8"', "--dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ("emulated-decode-ms = nan", "--emulated-decode-ms: "),
        ("cpus = ['a']", "--cpus: "),
        ("ping-ms = 0", "--ping-ms: Input should be greater than or equal to 1"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_place(
    write: Callable[..., str], text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text)
    key = text.splitlines()[-1].split(" ")[0]
    with pytest.raises(SystemExit):
        parsed("--config", path)
    told = capsys.readouterr().err
    assert message in told
    assert f"(from {path}: " in told
    assert f"{key})" in told


@pytest.mark.parametrize("kind", ["absent", "directory", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "none"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"cannot read {path}: .*TOML file"):
        read_config_file(str(path))


def test_an_empty_name_is_no_file() -> None:
    with pytest.raises(ConfigError, match="name of the configuration file is empty"):
        read_config_file("")


@pytest.mark.parametrize("program", ["prefill_node", "decode_node"])
def test_a_daemon_refuses_a_bad_file_at_once(write: Callable[..., str], program: str) -> None:
    command = [sys.executable, "-c", REFUSE_AND_REPORT.format(program=program)]
    path = write("[decode]\nslot = 1\n")
    done = subprocess.run(
        [*command, "--config", path], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    status, heavy, cpu_s = json.loads(done.stdout)
    assert (status, heavy) == (2, [])
    assert cpu_s < 1.0
    assert f"error: {path}: [decode] slot: there is no such option" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_is_accepted_by_both_nodes_and_describes_a_pair() -> None:
    prefill = parsed("--config", str(EXAMPLE), config_class=PrefillConfig)
    decode = parsed("--config", str(EXAMPLE))
    assert decode.pd_prefill_worker == (prefill.bind,)
    assert decode.prefetch_depth == prefill.source_slots == 1
    assert decode.max_tokens == prefill.max_tokens == 2_048


def plan_with(path: str, **fields: Any) -> tuple[PrefillConfig, DecodeConfig]:
    """The configurations of the daemons that the launcher would start."""
    plan = PairPlan(**fields).with_file(read_config_file(path))
    worker = plan.prefill_endpoint or "ipc:///own-p"
    prefill = parse(PrefillConfig, plan.prefill_flags(worker, ()), "0", {})
    flags = plan.decode_flags(plan.decode_endpoint or "ipc:///own-d", (worker,), ())
    return prefill, parse(DecodeConfig, flags, "0", {})


def test_the_launcher_leaves_to_the_file_what_the_file_says(write: Callable[..., str]) -> None:
    path = write(
        'backend = "emulated"\nmax-tokens = 99\n[prefill]\nsource-slots = 4\n'
        '[decode]\npd-prefetch-next = 3\nbind = "ipc:///file-d"\n'
    )
    prefill, decode = plan_with(path)
    assert (prefill.backend, decode.backend, prefill.max_tokens) == ("emulated", "emulated", 99)
    assert (prefill.source_slots, decode.prefetch_depth, decode.pd_remote_only) == (4, 3, True)
    assert (prefill.bind, decode.bind, decode.pd_prefill_worker) == (
        "ipc:///own-p",
        "ipc:///file-d",
        ("ipc:///own-p",),
    )


def test_the_launchers_flags_beat_the_file(write: Callable[..., str]) -> None:
    path = write('backend = "emulated"\nmax-tokens = 99\n[decode]\npd-prefetch-next = 3\n')
    prefill, decode = plan_with(path, kind="npu", max_tokens=98, prefetch_depth=0, decode_endpoint="ipc:///f")
    assert (prefill.backend, decode.backend, decode.max_tokens) == ("rngd", "atom", 98)
    assert (prefill.source_slots, decode.prefetch_depth, decode.bind) == (1, 0, "ipc:///f")


def test_a_file_that_allows_local_prefill_has_no_prefetch_by_itself(write: Callable[..., str]) -> None:
    _, decode = plan_with(write("[decode]\npd-remote-only = false\n"))
    assert (decode.pd_remote_only, decode.prefetch_depth) == (False, 0)


def test_the_launcher_starts_the_prefill_node_where_the_decode_node_looks_for_it(
    write: Callable[..., str],
) -> None:
    worker = '[decode]\npd-prefill-worker = "tcp://127.0.0.1:5701"\n'
    prefill, decode = plan_with(write(worker))
    assert prefill.bind == "tcp://127.0.0.1:5701"
    assert decode.pd_prefill_worker == (prefill.bind,)
    with pytest.raises(ConfigError, match=r"\[decode\] pd-prefill-worker is .*make both equal"):
        plan_with(write(worker + '[prefill]\nbind = "ipc:///elsewhere"\n'))


def test_keys_of_a_file_are_the_launchers_as_well(write: Callable[..., str]) -> None:
    path = write('key-file = "k.key"\nallowed-keys = "all"\n')
    plan = PairPlan().with_file(read_config_file(path))
    assert (plan.key_file, plan.allowed_keys) == ("k.key", "all")
    with pytest.raises(ConfigError, match="one key: put it above the tables"):
        PairPlan().with_file(read_config_file(write('[decode]\nkey-file = "k.key"\n')))


def test_the_name_of_the_built_in_model_stands_in_one_place() -> None:
    folders = ("common", "transport", "prefill_node", "decode_node", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = [path.name for path in paths if "SmolLM2-135M" in path.read_text()]
    assert named == ["registry.py"]


def test_tables_for_the_launcher_are_handed_on_and_mean_nothing_to_a_node(write: Callable[..., str]) -> None:
    path = write(
        '[decode]\nmax-queue = 9\n[gateway]\nport = 8080\nserved_model_name = "m"\n[up]\nprefill-nodes = 2\n'
    )
    file = read_config_file(path)
    assert file.gateway == {"port": 8080, "served-model-name": "m"}
    assert file.up == {"prefill-nodes": 2}
    assert parsed("--config", path).max_queue == 9


def test_a_launcher_table_must_be_a_table(write: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"gateway must be a table"):
        read_config_file(write("gateway = 8080\n"))
