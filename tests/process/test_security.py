"""Who may use a pair of daemons, and what of a prompt anybody else can see: keys, files, logs, STATUS."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from common.errors import ErrorCode, ExitStatus, HandshakeRefused, TandemError
from common.log import WARNINGS_PER_WINDOW
from common.messages import Failed, Finished, Rejected, Submit
from tests.process.harness import start_afresh
from tests.process.raw_peer import RawPeer
from tests.process.script_runs import Up, run
from tests.process.world import PATIENT, PREFETCH, Answer, Pair, World, expected, prompt_of
from transport.client import Client
from transport.codec import PROTOCOL_TAG, encode
from transport.key_files import ClientKeys, allow_key, connecting_keys, make_key_pair

STRANGERS = 30
SHORT_MS = 800


class Keys:
    """Pairs of two nodes, of a client that both list, and of a stranger."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "keys"
        names = ("prefill", "decode", "alice", "mallory")
        self.files = {name: make_key_pair(name, self.directory) for name in names}
        for listed in ("decode", "alice"):
            allow_key(self.files[listed][1], self.directory / "allowed")

    def of(self, client: str, server: str) -> ClientKeys:
        keys = connecting_keys(str(self.files[client][0]), str(self.files[server][1]))
        assert keys is not None
        return keys

    def flags(self, name: str) -> tuple[str, ...]:
        return (
            *("--key-file", str(self.files[name][0])),
            *("--allowed-keys", str(self.directory / "allowed")),
        )

    def secrets(self) -> list[str]:
        return [path.read_text().split()[1] for path, _ in self.files.values()]


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[World, Keys, dict[str, Any]]]:
    """A pair with keys, bound to every address of the machine, and its daemons by role."""
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world, keys = World(Path(directory)), Keys(Path(directory))
        prefill = world.prefill(*keys.flags("prefill"), bind="tcp://0.0.0.0:0")
        prefill.endpoint = prefill.endpoint.replace("0.0.0.0", "127.0.0.1")
        server = ("--server-key", str(keys.files["prefill"][1]))
        decode = world.decode(prefill, *keys.flags("decode"), *server, *PREFETCH, bind="tcp://0.0.0.0:0")
        decode.endpoint = decode.endpoint.replace("0.0.0.0", "127.0.0.1")
        world.wait_for_log(decode, "session.opened")
        yield world, keys, {"prefill": prefill, "decode": decode}
        for daemon in (decode, prefill):
            world.stop(daemon)
        world.close()


def run_job(client: Client, label: str, **job: Any) -> Answer:
    """Submit and read to the end."""
    answer = Answer()
    client.submit(label, **job)
    while answer.end is None:
        for message in client.events(timeout_ms=5_000):
            answer.token_ids += getattr(message, "token_ids", ())
            if isinstance(message, (Finished, Failed, Rejected)):
                answer.end = message
    return answer


def check_served(keyed: tuple[World, Keys, dict[str, Any]]) -> None:
    """The listed client gets the right tokens."""
    _, keys, daemons = keyed
    prompt_ids = prompt_of(40)
    with Client(daemons["decode"].endpoint, times=PATIENT, keys=keys.of("alice", "decode")) as client:
        answer = run_job(client, "job", prompt_ids=prompt_ids, sampling={"max_tokens": 5})
    assert answer.token_ids == expected(prompt_ids, 5)


def test_a_listed_client_is_served_and_strangers_get_nothing(
    keyed: tuple[World, Keys, dict[str, Any]],
) -> None:
    world, keys, daemons = keyed
    check_served(keyed)
    for role, daemon in daemons.items():
        with Client(daemon.endpoint, times=PATIENT, keys=keys.of("alice", role)) as listed:
            assert listed.status()["clients_denied"] == 0
        with pytest.raises(TandemError, match="--server-key"):
            Client(daemon.endpoint, connect_timeout_ms=SHORT_MS)
        other = "prefill" if role == "decode" else "decode"
        with pytest.raises(TandemError, match="is --server-key its public key"):
            Client(daemon.endpoint, connect_timeout_ms=SHORT_MS, keys=keys.of("alice", other))
        for _ in range(STRANGERS):
            with pytest.raises(HandshakeRefused, match=r"does not list this key.*keys\.py allow"):
                Client(daemon.endpoint, keys=keys.of("mallory", role))
        with Client(daemon.endpoint, times=PATIENT, keys=keys.of("alice", role)) as listed:
            assert listed.status()["clients_denied"] >= STRANGERS + 2
        entry = world.wait_for_log(daemon, "client.denied", reason="its key is not listed")
        assert entry["key"] == keys.of("mallory", role).own.public.decode()
        assert entry["peer"] == "127.0.0.1"
        # Two windows at most went by, or three on a machine that stood still.
        assert len(daemon.logged("client.denied", peer="127.0.0.1")) <= 3 * WARNINGS_PER_WINDOW
    check_served(keyed)
    for daemon in daemons.values():
        seen = f"{daemon.entries}{daemon.complaints}{daemon.output}"
        seen += Path(f"/proc/{daemon.process.pid}/cmdline").read_text()
        assert [secret for secret in keys.secrets() if secret in seen] == []


def test_a_decode_node_that_is_not_listed_ends_and_says_so(
    keyed: tuple[World, Keys, dict[str, Any]],
) -> None:
    world, keys, daemons = keyed
    flags = (*keys.flags("mallory"), "--server-key", str(keys.files["prefill"][1]))
    stranger = world.launch("decode_node", "--pd-prefill-worker", daemons["prefill"].endpoint, *flags)
    assert world.exit_of(stranger) == ExitStatus.REFUSED
    entry = stranger.logged("hello.refused")[0]
    assert "that node does not list this key" in entry["detail"]


def test_shared_memory_of_a_daemon_is_its_users_alone_and_cannot_be_guessed(
    keyed: tuple[World, Keys, dict[str, Any]],
) -> None:
    _, _, daemons = keyed
    [slab] = set(daemons["prefill"].slabs)
    assert slab.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"tandem-[0-9a-f]{22}", slab.name)


REFUSED = {
    "a bind to the world": (
        ("--bind", "tcp://0.0.0.0:0"),
        r"refused without keys; make them with 'python scripts/keys\.py make NAME'",
    ),
    "a secret that others can read": (
        ("--key-file", "{open}", "--allowed-keys", "{allowed}"),
        r"others can read it \(mode 0644\): chmod 600 ",
    ),
    "a socket file that others can reach": (
        ("--bind", "ipc://{public}/s"),
        r"whoever reaches ipc://.*: chmod 700 ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_let_others_in_is_a_configuration_error(case: str, world: World) -> None:
    flags, message = REFUSED[case]
    secret, public = make_key_pair("node", world.directory / "keys")
    secret.chmod(0o644)
    open_directory = world.directory / "public"
    open_directory.mkdir()
    open_directory.chmod(0o755)
    names = {"open": secret, "allowed": public, "public": open_directory}
    bind = () if "--bind" in flags else ("--bind", "tcp://127.0.0.1:0")
    named = (flag.format(**names) for flag in flags)
    process = start_afresh("prefill_node", "--backend", "emulated", *bind, *named)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (ExitStatus.CONFIG, "")
    assert "Traceback" not in errors
    assert re.search(message, errors), errors
    assert secret.read_text().split()[1] not in errors


PROMPT = "Xyzzy marker plugh, 7 times secret"
PROMPT_IDS = list(PROMPT.encode())  # the emulated tokenizer's


def traces_of(prompt: str, *sequences: list[int]) -> list[str]:
    """Every form in which a prompt or an answer might turn up in text."""
    traces = [prompt[:12], json.dumps(prompt)[1:12]]
    for ids in sequences:
        part = ids[2:8]
        packed = b"".join(token_id.to_bytes(4, "little") for token_id in part)
        traces += [mark.join(map(str, part)) for mark in (", ", ",", " ")]
        traces += [packed.hex(), packed.hex(" ", 4), repr(packed)[2:-1], packed.decode("latin-1")]
    return traces


def test_nothing_of_a_prompt_or_an_answer_is_left_where_others_can_read_it(world: World) -> None:
    loud = ("--log-level", "debug")
    pair = world.pair(prefill=loud, decode=(*PREFETCH, *loud))
    wanted = expected(PROMPT_IDS, 12)
    traces = traces_of(PROMPT, PROMPT_IDS, wanted)
    told: list[str] = []

    def job(label: str, **body: Any) -> Answer:
        return pair.client.submit_body(label, **({"prompt": PROMPT, "sampling": {"max_tokens": 12}} | body))

    pair.prefill.hold("prefill.chunk")
    answer = job("good")
    world.wait_held(pair.prefill, "prefill.chunk")
    told += [json.dumps(world.status(daemon)) for daemon in (pair.decode, pair.prefill)]
    pair.prefill.release("prefill.chunk")
    assert world.end_of(answer).token_ids == wanted
    told += [json.dumps(world.status(daemon)) for daemon in (pair.decode, pair.prefill)]
    for daemon, point, action, code in (
        (pair.prefill, "prefill.chunk", "fail", ErrorCode.PREFILL_ERROR),
        (pair.prefill, "prefill.computed", "corrupt", ErrorCode.KV_CORRUPT),
        (pair.decode, "decode.step", "fail", ErrorCode.ENGINE_ERROR),
        (pair.decode, "text.prepare", "fail", ErrorCode.INVALID_REQUEST),
    ):
        daemon.spoil(point, action)
        failed = world.end_of(job(point))
        assert failed.code == code
        told.append(failed.end.detail)
    for label, body in rejected_bodies().items():
        rejected = world.end_of(job(label, **body))
        assert isinstance(rejected.end, Rejected)
        told.append(rejected.end.detail)
    told += broken_messages(pair)
    pair.wait_clean()
    for daemon in (pair.decode, pair.prefill):
        told += [json.dumps(entry) for entry in daemon.entries] + [str(entry) for entry in daemon.entries]
        told += [*daemon.complaints, *daemon.output]
    told += [path.read_text() for path in world.directory.rglob("*") if path.is_file()]
    assert [(trace, text) for trace in traces for text in told if trace in text] == []
    # The search would find them.
    assert all(trace in f"{PROMPT} {json.dumps(PROMPT)} {as_text(PROMPT_IDS, wanted)}" for trace in traces)


def as_text(*sequences: list[int]) -> str:
    texts = []
    for ids in sequences:
        packed = b"".join(token_id.to_bytes(4, "little") for token_id in ids)
        texts += [str(ids), json.dumps(ids, separators=(",", ":")), " ".join(map(str, ids)), packed.hex()]
        texts += [packed.hex(" ", 4), repr(packed), packed.decode("latin-1")]
    return " ".join(texts)


def rejected_bodies() -> dict[str, dict[str, Any]]:
    """Jobs that cannot be, with the marker wherever a client may write."""
    ids = [*PROMPT_IDS, 10**6]
    return {
        "ids": {"prompt": None, "prompt_ids": ids},
        "too long": {"prompt": PROMPT * 100},
        "role": {"prompt": None, "messages": [{"role": PROMPT, "content": PROMPT}]},
        "shape": {"prompt": None, "messages": [{"role": "user", PROMPT: PROMPT}]},
        "two": {"prompt_ids": PROMPT_IDS},
        "value": {"sampling": {"max_tokens": PROMPT}},
        "stop": {"sampling": {"stop": [PROMPT] * 100}},
        "stop ids": {"sampling": {"stop_token_ids": PROMPT_IDS * 50}},
    }


def broken_messages(pair: Pair) -> list[str]:
    """Both nodes are sent messages that make no sense, with the marker in them; what they answer."""
    marker = PROMPT.encode()
    told = []
    for daemon in (pair.decode, pair.prefill):
        with RawPeer(daemon.endpoint) as peer:
            peer.send_frames(marker, marker)
            peer.send_frames(PROTOCOL_TAG, marker, marker)
            peer.hello()
            for _ in range(2):
                head = encode(peer.next_header(), Submit("x", prompt=PROMPT))
                peer.send_frames(*head[:2], head[2] + marker)
                told.append(repr(peer.receive()))
            if daemon is pair.prefill:
                peer.send(Submit("x", prompt=PROMPT, prompt_ids=tuple(PROMPT_IDS)))
                told.append(repr(peer.receive()))
    return told


def test_a_pair_of_the_launcher_takes_keys_and_keeps_prompts_to_itself() -> None:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        runtime = Path(directory)
        keys = ("--dir", str(runtime / "keys"))
        for name in ("pair", "alice", "mallory"):
            done = run(runtime, "keys", "make", name, *keys)
            assert done.returncode == 0
            assert (runtime / "keys" / f"{name}.key").read_text().split()[1] not in done.stdout.decode()
        assert run(runtime, "keys", "make", "pair", *keys).returncode == 2
        assert run(runtime, "keys", "allow", str(runtime / "keys" / "alice.pub"), *keys).returncode == 0
        listed = run(runtime, "keys", "list", *keys).stdout.decode()
        assert "alice  allowed" in listed
        own = ("--key-file", str(runtime / "keys" / "pair.key"))
        loud = ("--log-level", "debug")
        up = Up(
            runtime,
            *(*own, "--allowed-keys", str(runtime / "keys" / "allowed"), "--decode-endpoint"),
            *("tcp://0.0.0.0:0", "--prefill-args", *loud, "--decode-args", *loud),
        )
        try:
            endpoint = ("--endpoint", up.decode_endpoint.replace("0.0.0.0", "127.0.0.1"))
            server = ("--server-key", str(runtime / "keys" / "pair.pub"))
            send = (*endpoint, PROMPT, "--raw", "--json", "--max-tokens", "12")
            good = run(runtime, "send", *send, *server, "--key-file", str(runtime / "keys" / "alice.key"))
            assert json.loads(good.stdout)["token_ids"] == expected(PROMPT_IDS, 12)
            bad = run(runtime, "send", *send, *server, "--key-file", str(runtime / "keys" / "mallory.key"))
            assert (bad.returncode, bad.stdout) == (1, b"")
            assert b"does not list this key" in bad.stderr
            none = run(runtime, "send", *send)
            assert (none.returncode, none.stdout) == (1, b"")
            assert b"--key-file and --server-key" in none.stderr
        finally:
            assert up.stop() == 0
        traces = traces_of(PROMPT, PROMPT_IDS, expected(PROMPT_IDS, 12))
        left = [path for path in (runtime / "tandem").rglob("*") if path.is_file()]
        assert any(path.suffix == ".log" and '"level":"debug"' not in path.name for path in left)
        assert [(path, trace) for path in left for trace in traces if trace in path.read_text()] == []
        assert [path for path in left if path.stat().st_mode & 0o077 and not private(path, runtime)] == []


def private(path: Path, top: Path) -> bool:
    """Whether some directory on the way keeps others out."""
    return any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents if parent.is_relative_to(top))
