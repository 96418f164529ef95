"""Keys from the environment, and strangers at the doors of nodes that have nothing to do.

Each test starts what it needs: an idle node hears of nothing else, and a launcher reads its own environment.
"""

from pathlib import Path

import pytest

from tests.contract.wires import raw_connection
from tests.process.script_runs import Up, run
from tests.process.world import World
from transport.key_files import make_key_pair

# ZMTP 3.1: signature, version, and the mechanism of those who have no keys.
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_node_with_keys_hears_of_a_stranger(world: World, tmp_path: Path, role: str) -> None:
    secret, public = make_key_pair("node", tmp_path / "keys")
    flags = ("--key-file", str(secret), "--allowed-keys", str(public))
    node = (
        world.prefill(*flags, bind="tcp://127.0.0.1:0")
        if role == "prefill"
        else world.decode(None, *flags, bind="tcp://127.0.0.1:0")
    )
    for count in (1, 2):
        with raw_connection(node.endpoint) as stranger:
            stranger.sendall(NULL_GREETING)
            world.wait_for_log(node, "client.denied", count)


def test_the_launcher_takes_no_key_of_a_client_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CLIENT_KEY_FILE", str(tmp_path / "alice.key"))
    monkeypatch.setenv("TANDEM_CLIENT_SERVER_KEY", str(tmp_path / "pair.pub"))
    up = Up(tmp_path)
    try:
        monkeypatch.delenv("TANDEM_CLIENT_KEY_FILE")
        monkeypatch.delenv("TANDEM_CLIENT_SERVER_KEY")
        assert run(tmp_path, "status", "--once").returncode == 0
    finally:
        assert up.stop() == 0


@pytest.mark.parametrize("flag", ["key-file", "allowed-keys"])
def test_an_empty_key_of_the_launcher_is_refused_by_name(
    tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(tmp_path, "up", f"--{flag}", "")
    assert (done.returncode, done.stderr.decode()) == (
        2,
        f"up: --{flag} is empty; leave it out or give it a value\n",
    )
    variable = "TANDEM_" + flag.replace("-", "_").upper()
    monkeypatch.setenv(variable, "")
    done = run(tmp_path, "up")
    assert (done.returncode, done.stderr.decode()) == (
        2,
        f"up: environment variable {variable} is empty; unset it or give it a value\n",
    )
