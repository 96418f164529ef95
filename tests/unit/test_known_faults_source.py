"""Faults that other systems had and that cannot happen here, because the source holds nothing of the kind.

Each rule looks at the syntax of all shipped modules; a rule that does not find its own offender fails too.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from common.decode_config import DecodeConfig
from common.endpoints import is_local
from common.prefill_config import PrefillConfig

ROOT = Path(__file__).parents[2]
SHIPPED = ("common", "transport", "prefill_node", "decode_node", "scripts")
Rule = Callable[[ast.AST], Iterator[str]]


def is_coroutine(node: ast.AST) -> Iterator[str]:
    """A coroutine can be cancelled while it holds something, or between a message and its handling."""
    if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor):
        yield "runs as a coroutine"
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    yield from (
        f"imports {name}" for name in names if name.startswith(("asyncio", "zmq.asyncio", "zmq.green"))
    )


def may_block_on_a_socket(node: ast.AST) -> Iterator[str]:
    """Only `zmq.NOBLOCK` sends and receives, so that a peer that takes nothing stops nobody."""
    methods = ("send_multipart", "recv_multipart", "send_string", "recv_string", "send_json", "recv_json")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        words = [ast.unparse(argument) for argument in node.args]
        zmq_receive = node.func.attr == "recv" and not any("BYTES" in word for word in words)
        if (node.func.attr in methods or zmq_receive) and not any("NOBLOCK" in word for word in words):
            yield f"waits in {ast.unparse(node.func)}"


def sends_memory_that_may_change(node: ast.AST) -> Iterator[str]:
    """A buffer that is sent without a copy must not be used again before its own tracker says so."""
    if isinstance(node, ast.Call):
        yield from (
            f"passes {keyword.arg}"
            for keyword in node.keywords
            if keyword.arg in ("copy", "track")
            and ast.unparse(keyword.value) == ("False" if keyword.arg == "copy" else "True")
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith(("send", "recv"))
        )


def forks_without_exec(node: ast.AST) -> Iterator[str]:
    """A ZeroMQ context does not survive a fork; processes are started by exec."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    yield from (f"imports {name}" for name in names if name.startswith(("multiprocessing", "concurrent")))
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.fork", "os.forkpty"):
        yield f"uses {ast.unparse(node)}"


def loads_code_with_data(node: ast.AST) -> Iterator[str]:
    """Formats that can hold code are not read: what arrives, or lies in a file, is data."""
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "torch.load" and words.get("weights_only") != "True":
        yield "loads a pickle"
    if words.get("allow_pickle") == "True" or words.get("trust_remote_code") == "True":
        yield f"lets {name} run what it reads"
    if words.get("shell") == "True" or name in ("yaml.load", "yaml.unsafe_load", "os.system"):
        yield f"runs {name}"


RULES: list[tuple[Rule, str]] = [
    (is_coroutine, "async def receive(): pass"),
    (may_block_on_a_socket, "frames = socket.recv_multipart()"),
    (sends_memory_that_may_change, "socket.send_multipart(frames, zmq.NOBLOCK, copy=False)"),
    (forks_without_exec, "import multiprocessing"),
    (loads_code_with_data, "torch.load(path)"),
]


# The bulk sockets send KV from where it lies, and let a slot go when their trackers say so.
MEANT = {sends_memory_that_may_change: {"bulk_link.py": ["passes copy", "passes copy"]}}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def offences(rule: Rule, source: str) -> list[str]:
    return sorted(offence for node in nodes_of(source) for offence in rule(node))


@pytest.mark.parametrize(("rule", "offender"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_k10_k22_no_shipped_module_does_what_went_wrong_elsewhere(rule: Rule, offender: str) -> None:
    assert offences(rule, offender) != [], "the rule finds nothing"
    paths = [path for package in SHIPPED for path in sorted((ROOT / package).rglob("*.py"))]
    # What measures raw sockets against ours does on purpose what ours must not.
    paths = [path for path in paths if path.parent.name != "benchmarks"]
    if rule is is_coroutine:
        # The gateway holds no slot and no lane: a cancelled request of its own costs a CANCEL.
        paths = [path for path in paths if path.parent.name != "gateway"]
    found = {path.name: offences(rule, path.read_text(encoding="utf-8")) for path in paths}
    assert {name: faults for name, faults in found.items() if faults} == MEANT.get(rule, {})


@pytest.mark.parametrize("config_class", [PrefillConfig, DecodeConfig])
def test_k22_nothing_is_bound_beyond_this_machine_by_default(
    config_class: type[PrefillConfig | DecodeConfig],
) -> None:
    assert is_local(config_class.model_fields["bind"].default)
