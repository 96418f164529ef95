"""Which configurations exist, and what a person reads who asks for another."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.command_line import parse, variable_of
from common.config import NodeConfig, flag_of
from common.cpus import available_cpus, parse_cpus
from common.decode_config import DecodeConfig
from common.endpoints import check_bind_endpoint, check_connect_endpoint
from common.errors import ConfigError
from common.prefetch_route import check_prefetch_route
from common.prefill_config import PrefillConfig

WORKER = "tcp://prefill-host:5701"
ROUTE: dict[str, Any] = {"pd_prefill_worker": WORKER, "pd_remote_only": True}
FIRST_CPU = min(available_cpus())
REFUSE_AND_REPORT = """
import json, resource, sys
opened = []
sys.addaudithook(lambda name, arguments: opened.append(str(arguments[0])) if name == "open" else None)
from common.command_line import parse
from common.decode_config import DecodeConfig
try:
    parse(DecodeConfig, sys.argv[1:], "0")
except SystemExit as refusal:
    heavy = sorted({"torch", "transformers", "zmq"} & sys.modules.keys())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({
        "status": refusal.code, "heavy": heavy, "cpu_s": usage.ru_utime + usage.ru_stime,
        "model_files": [path for path in opened if "some-model" in path],
    }))
"""


def parsed(
    *argv: str, environment: Mapping[str, str] | None = None, config_class: type[Any] = DecodeConfig
) -> Any:
    return parse(config_class, argv, "9.9", environment or {})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **options: Any) -> str:
    """What a refused command line prints; asserts how it is printed."""
    with pytest.raises(SystemExit) as exit_info:
        parsed(*argv, **options)
    output = capsys.readouterr()
    assert exit_info.value.code == 2
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


def test_the_defaults_are_a_valid_configuration_of_both_daemons() -> None:
    assert PrefillConfig().bind == "tcp://127.0.0.1:5701"
    assert DecodeConfig().bind == "tcp://127.0.0.1:5700"
    assert DecodeConfig().prefetch_depth == 0
    assert not DecodeConfig().pd_remote_only


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecodeConfig().slots = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (DecodeConfig, {"pd_remote_only": True}, "add --pd-prefill-worker"),
        (DecodeConfig, {**ROUTE, "on_prefill_failure": "local"}, "--on-prefill-failure local"),
        (DecodeConfig, {"pd_prefetch_next": 1}, "--pd-prefetch-next needs a prefill node"),
        (
            DecodeConfig,
            {"pd_prefetch_next": 1, "pd_prefill_worker": WORKER},
            "needs a route without local prefill: add --pd-remote-only",
        ),
        (DecodeConfig, {**ROUTE, "pd_prefetch_next": 0}, "--pd-prefetch-next.*greater than or equal to 1"),
        (DecodeConfig, {**ROUTE, "pd_prefetch_next": -1}, "--pd-prefetch-next.*greater than or equal to 1"),
        (DecodeConfig, {"slots": 257}, "--slots 257: backend torch decodes 256 requests at once: use 1 to"),
        (DecodeConfig, {"slots": 0}, "--slots 0"),
        (DecodeConfig, {"backend": "rngd"}, "rngd cannot decode: use one of torch, emulated, atom"),
        (DecodeConfig, {"backend": "tpu"}, "no backend 'tpu'"),
        (DecodeConfig, {"backend": "atom"}, "atom cannot prefill locally: add --pd-remote-only"),
        (DecodeConfig, {**ROUTE, "backend": "atom", "slots": 2}, "atom decodes 1 request at once"),
        (PrefillConfig, {"backend": "atom"}, "it cannot prefill; use one of torch, emulated, rngd"),
        (PrefillConfig, {"backend": "tpu"}, "there is no such backend"),
        (PrefillConfig, {"slots": 1}, "--slots: there is no such option"),
        (PrefillConfig, {"source_slots": 0}, "--source-slots"),
        (PrefillConfig, {"lease_ms": 3_000}, "--lease-ms 3000: each must be greater"),
        (PrefillConfig, {"suspect_ms": 500}, "--suspect-ms 500"),
        (PrefillConfig, {"dead_after_ms": 1_500}, "--dead-after-ms 1500"),
        (DecodeConfig, {"ping_ms": 0}, "--ping-ms"),
        (DecodeConfig, {"drain_ms": 10**12}, "--drain-ms"),
        (DecodeConfig, {"dtype": "float8"}, "--dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        (DecodeConfig, {"max_tokens": 0}, "--max-tokens"),
        (DecodeConfig, {"chunk_tokens": "many"}, "--chunk-tokens.*'many'"),
        (DecodeConfig, {"max_queue": 0}, "--max-queue"),
        (DecodeConfig, {"model": ""}, "--model"),
        (DecodeConfig, {"emulated_decode_ms": "nan"}, "--emulated-decode-ms"),
        (DecodeConfig, {"hold_dir": "no/such/directory"}, "not a directory"),
        (DecodeConfig, {"cpus": "0,99999"}, "CPU 99999: not available here"),
        (DecodeConfig, {"cpus": ()}, "list empty"),
        (DecodeConfig, {"bind": "tcp://0.0.0.0:5700"}, "non-loopback address is refused"),
        (DecodeConfig, {"pd_prefill_worker": "prefill-host:5701"}, "not an endpoint"),
    ],
)
def test_what_cannot_work_is_refused_in_the_constructor(
    config_class: type[NodeConfig], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_class(**values)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--dtype: .*; --ping-ms: "):
        DecodeConfig(ping_ms="often", dtype="int4")


@pytest.mark.parametrize("backend", ["torch", "emulated", "atom"])
def test_any_decoding_backend_may_prefetch(backend: str) -> None:
    assert DecodeConfig(**ROUTE, backend=backend, pd_prefetch_next=3).prefetch_depth == 3


def test_the_route_check_is_the_same_for_a_constructor_without_configuration() -> None:
    route = {
        "prefill_workers": (WORKER,),
        "remote_only": True,
        "backend": "emulated",
        "slots": 1,
        "prefetch_depth": 1,
        "on_prefill_failure": "fail",
    }
    check_prefetch_route(**route)
    for change in ({"remote_only": False}, {"prefill_workers": ()}, {"slots": 999}, {"prefetch_depth": -1}):
        with pytest.raises(ValueError, match=r"--(pd-|slots)"):
            check_prefetch_route(**{**route, **change})


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:0",
        "tcp://127.9.9.9:65535",
        "tcp://localhost:5700",
        "ipc:///tmp/" + "x" * 102,
        "ipc://a",
    ],
)
def test_loopback_and_socket_files_may_be_bound(endpoint: str) -> None:
    assert check_bind_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("tcp://*:5700", "non-loopback"),
        ("tcp://eth0:5700", "non-loopback"),
        ("tcp://192.168.0.7:5700", "SSH tunnel"),
        ("tcp://127.0.0.1", "not an endpoint"),
        ("tcp://127.0.0.1:65536", "not an endpoint"),
        ("tcp://127.0.0.1:*", "not an endpoint"),
        ("tcp://127.0.0.1:-1", "not an endpoint"),
        ("tcp://127.0.0.1:5700\n", "not an endpoint"),
        ("http://127.0.0.1:5700", "not an endpoint"),
        ("", "not an endpoint"),
        ("ipc://", "path of a socket file"),
        ("ipc://*", "path of a socket file"),
        ("ipc://@abstract", "path of a socket file"),
        ("ipc:///tmp/\0", "path of a socket file"),
        ("ipc:///tmp/" + "x" * 103, "108 bytes"),
        ("ipc:///tmp/" + "é" * 52, "109 bytes"),
    ],
)
def test_other_addresses_are_not_bound(endpoint: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_bind_endpoint(endpoint)


def test_any_host_may_be_connected_to_but_not_port_zero() -> None:
    assert check_connect_endpoint("tcp://192.168.0.7:5701") == "tcp://192.168.0.7:5701"
    for endpoint in ("tcp://prefill-host:0", "tcp://*:5701"):
        with pytest.raises(ValueError, match="cannot connect"):
            check_connect_endpoint(endpoint)


def test_a_list_of_cpus_may_repeat_and_overlap() -> None:
    assert parse_cpus(f"{FIRST_CPU}, {FIRST_CPU}-{FIRST_CPU}") == (FIRST_CPU,)


@pytest.mark.parametrize("text", ["", ",", "1-", "2-1", "-1", "a", "0x1", "0;1", "0-1-2"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of CPUs"):
        parse_cpus(text)


def test_the_engine_is_told_what_the_flags_say() -> None:
    settings = parsed(
        *("--backend", "emulated", "--model", "m", "--dtype", "float16", "--max-tokens", "64"),
        *("--chunk-tokens", "8", "--cpus", str(FIRST_CPU), "--emulated-seed", "7"),
        *("--emulated-prefill-tokens-per-s", "1000.5", "--emulated-decode-ms", "2"),
    ).engine_settings()
    assert (settings.backend, settings.model, settings.dtype) == ("emulated", "m", "float16")
    assert (settings.max_tokens, settings.chunk_tokens, settings.lanes, settings.threads) == (64, 8, 1, 1)
    assert settings.emulated_seed == 7
    assert (settings.emulated_prefill_tokens_per_s, settings.emulated_decode_ms) == (1000.5, 2.0)


def test_without_a_list_of_cpus_there_is_a_thread_for_each_available() -> None:
    assert PrefillConfig().engine_settings().threads == len(available_cpus())


def test_command_line_beats_environment_beats_default() -> None:
    environment = {"TANDEM_MAX_QUEUE": "7", "TANDEM_PING_MS": "200"}
    config = parsed("--max-queue", "8", environment=environment)
    assert (config.max_queue, config.ping_ms, config.suspect_ms) == (8, 200, 1_500)


def test_a_switch_of_the_environment_can_be_turned_off() -> None:
    environment = {"TANDEM_PD_REMOTE_ONLY": "1", "TANDEM_PD_PREFILL_WORKER": WORKER}
    assert parsed(environment=environment).pd_remote_only
    assert not parsed("--no-pd-remote-only", environment=environment).pd_remote_only


def test_a_bare_prefetch_flag_means_depth_one() -> None:
    route = ("--pd-prefill-worker", WORKER, "--pd-remote-only")
    assert parsed(*route, "--pd-prefetch-next").prefetch_depth == 1
    assert parsed(*route, "--pd-prefetch-next", "4").prefetch_depth == 4
    assert parsed(*route).prefetch_depth == 0


def test_a_variable_of_the_other_daemon_is_ignored() -> None:
    environment = {"TANDEM_SLOTS": "5", "TANDEM_SOURCE_SLOTS": "3", "HOME": "x"}
    assert parsed(environment=environment, config_class=PrefillConfig).source_slots == 3


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TANDEM_SLOT": "1"}, "TANDEM_SLOT: there is no such option; did you mean TANDEM_SLOTS?"),
        ({"TANDEM_SLOTS": ""}, "TANDEM_SLOTS is empty"),
        ({"TANDEM_MODEL": " "}, "TANDEM_MODEL is empty"),
        ({"TANDEM_MAX_QUEUE": "lots"}, "(from the environment: TANDEM_MAX_QUEUE)"),
        ({"TANDEM_PD_REMOTE_ONLY": "maybe"}, "--pd-remote-only"),
    ],
)
def test_a_bad_variable_is_refused(
    capsys: pytest.CaptureFixture[str], environment: dict[str, str], message: str
) -> None:
    assert message in refusal(capsys, environment=environment)


def test_a_bad_variable_does_not_matter_when_its_flag_is_given() -> None:
    assert parsed("--max-queue", "3", environment={"TANDEM_MAX_QUEUE": ""}).max_queue == 3


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MAX_QUEUE", "11")
    assert parse(DecodeConfig, [], "9.9").max_queue == 11
    assert DecodeConfig().max_queue == 256


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--slots", "400"], "decode_node: error: --slots 400"),
        (["--slots"], "--slots: expected one argument"),
        (["--slot", "1"], "unrecognized arguments: --slot 1"),
        (["decode"], "unrecognized arguments: decode"),
        (["--log-level", "loud"], "--log-level"),
        (["--model", "\udcff"], "--model"),
    ],
)
def test_a_usage_error_is_a_line_on_stderr_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refusal(capsys, *argv)


@pytest.mark.parametrize("config_class", [PrefillConfig, DecodeConfig])
def test_help_names_every_flag_with_default_and_variable(
    capsys: pytest.CaptureFixture[str], config_class: type[NodeConfig]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parsed("--help", config_class=config_class)
    text = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0
    for name, field in config_class.model_fields.items():
        assert flag_of(name) in text
        assert f"environment: {variable_of(name)})" in text
        assert field.description is not None
        if name.endswith("_ms"):
            assert "in ms" in field.description


def test_version_is_the_one_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parsed("--version")
    assert (exit_info.value.code, capsys.readouterr().out) == (0, "decode_node 9.9\n")


@pytest.mark.parametrize(
    "argv",
    [["--pd-remote-only"], ["--slots", "400"], ["--pd-prefetch-next"], ["--backend", "rngd"], ["--help"]],
)
def test_a_refusal_is_instant_and_looks_at_no_model(argv: list[str], tmp_path: Path) -> None:
    # Whoever opens a pipe without a writer waits for ever.
    os.mkfifo(tmp_path / "some-model")
    command = [sys.executable, "-c", REFUSE_AND_REPORT, *argv, "--model", str(tmp_path / "some-model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["status"] == (0 if argv == ["--help"] else 2)
    assert report["heavy"] == []
    assert report["model_files"] == []
    assert report["cpu_s"] < 1.0


def test_the_cache_directory_in_the_environment_is_not_taken_for_an_option() -> None:
    config = parse(PrefillConfig, [], "1", environment={"TANDEM_CACHE": "/somewhere"})

    assert config == PrefillConfig()


def test_variables_of_the_gateway_and_of_clients_are_none_of_a_nodes_business() -> None:
    others = {"TANDEM_GATEWAY_PORT": "1", "TANDEM_API_KEY": "k"}
    assert parse(DecodeConfig, [], "0", others) == parse(DecodeConfig, [], "0", {})
