"""The gateway's options: flags before environment before defaults, and nothing unknown."""

import socket

import pytest

from decode_node.gateway.listening import listen
from decode_node.gateway.options import flag_of, parse, variable_of


def test_a_flag_beats_its_variable_which_beats_the_default() -> None:
    environment = {"TANDEM_GATEWAY_PORT": "9000", "TANDEM_GATEWAY_MAX_QUEUE": "7"}
    options = parse(["--port", "9001"], environment)
    assert (options.port, options.max_queue, options.drain_ms) == (9_001, 7, 30_000)


def test_variables_of_the_daemons_are_none_of_ours() -> None:
    assert parse([], {"TANDEM_SLOTS": "x", "HOME": "/"}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TANDEM_GATEWAY_PROT": "1"}, "did you mean TANDEM_GATEWAY_PORT?"),
        ({"TANDEM_GATEWAY_PORT": ""}, "environment variable TANDEM_GATEWAY_PORT is empty"),
        ({"TANDEM_GATEWAY_PORT": "x"}, "environment variable TANDEM_GATEWAY_PORT: must be a whole number"),
        ({"TANDEM_GATEWAY_HOST": "::"}, "--api-key-file"),
    ],
)
def test_a_wrong_variable_is_a_usage_error(
    environment: dict[str, str], words: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([], environment)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.5.0.1"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert parse(["--host", host], {}).host == host


@pytest.mark.parametrize(
    ("flags", "environment"), [(["--allow-anyone"], {}), ([], {"TANDEM_GATEWAY_ALLOW_ANYONE": "yes"})]
)
def test_a_host_for_everybody_without_keys_must_be_meant(
    flags: list[str], environment: dict[str, str]
) -> None:
    assert parse(["--host", "0.0.0.0", *flags], environment).allow_anyone
    for refused in (["--host", "0.0.0.0"], ["--api-key-file", "keys", "--allow-anyone"]):
        with pytest.raises(SystemExit):
            parse(refused, {"TANDEM_GATEWAY_ALLOW_ANYONE": "no"})


def test_help_names_every_flag_with_its_variable(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    text = capsys.readouterr().out.replace("\n", "")
    for name in ("decode", "port", "api_key_file", "drain_ms"):
        assert flag_of(name) in text
        assert variable_of(name) in text


def test_what_is_accepted_sends_small_chunks_at_once_and_holds_few_bytes() -> None:
    with listen("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2**19
