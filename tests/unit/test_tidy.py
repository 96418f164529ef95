"""The repository polices itself: rules of texture and layering that a linter does not know.

Each rule is a function from one module to the faults it finds there, beside a snippet that breaks it; a rule
that finds nothing in its own snippet fails too. Formatting, unused names and the like are ruff's. The limits
on sizes are bounds, not aims: a function should stay under 40 lines.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {"common": 0, "transport": 1, "prefill_node": 2, "decode_node": 2, "scripts": 3, "tests": 3}
SHIPPED = ("common", "transport", "prefill_node", "decode_node")
PURE = re.compile(
    r"(prefill_node|decode_node)/(core|scheduler|slots|lanes|jobs|ledger)\.py"
    r"|common/(lifecycle|messages|prefetch_route|kv_layout)\.py|transport/(peers|credit)\.py"
)
PURE_STDLIB = {
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "typing",
}
PURE_OTHERS = {"annotated_types"}
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BARE_MODULE_LINES_MAX = 25
BANNED_WORDS = {"req", "idx", "cfg", "ctx", "mgr", "tmp"}
GIVEN_NAMES = {"tmp_path", "tmp_path_factory"}
UNFINISHED = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b|NotImplemente[d]Error")


@dataclass(frozen=True)
class Module:
    path: str
    source: str

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def nodes(self) -> list[ast.AST]:
        return _nodes(self.source)

    @property
    def imports(self) -> Iterator[str]:
        """Dotted names of what is imported."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield f"{'.' * node.level}{node.module or ''}"

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for node in self.nodes if isinstance(node, ast.Call))


@cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


Rule = Callable[[Module], Iterator[str]]
RULES: list[tuple[Rule, Module]] = []


def rule(path: str, snippet: str) -> Callable[[Rule], Rule]:
    """Register a rule with a module that breaks it."""

    def register(function: Rule) -> Rule:
        RULES.append((function, Module(path, snippet)))
        return function

    return register


@rule("prefill_node/core.py", "from decode_node.slots import Ledger")
def imports_go_down_the_layers(module: Module) -> Iterator[str]:
    for name in module.imports:
        target = name.split(".")[0]
        below = module.package == "tests" or LAYERS.get(target, -1) < LAYERS[module.package]
        if target == "scripts" or (target != module.package and not below):
            yield f"imports {name}"


@rule("common/ids.py", "from . import clock")
def imports_are_absolute(module: Module) -> Iterator[str]:
    yield from (f"imports {name}" for name in module.imports if name.startswith("."))


@rule("decode_node/node.py", "import zmq")
def only_transport_speaks_zeromq(module: Module) -> Iterator[str]:
    if module.package not in ("transport", "tests"):
        yield from (f"imports {name}" for name in module.imports if name.split(".")[0] in ("zmq", "msgpack"))


@rule("decode_node/sampler.py", "import torch")
def only_engines_import_torch(module: Module) -> Iterator[str]:
    heavy = {"torch", "transformers", "gguf", "safetensors"}
    if module.package in SHIPPED and not module.path.startswith("common/engines/"):
        yield from (f"imports {name}" for name in module.imports if name.split(".")[0] in heavy)


@rule("decode_node/scheduler.py", "import random\nfrom common.log import NodeLog")
def cores_import_data_only(module: Module) -> Iterator[str]:
    if not PURE.fullmatch(module.path):
        return
    impure = {"common.clock", "common.ids", "common.log", "common.hooks", "common.cpus", "common.config"}
    impure |= {"common.prefill_config", "common.decode_config"}
    for name in module.imports:
        top = name.split(".")[0]
        if name in impure or top not in PURE_STDLIB | PURE_OTHERS | LAYERS.keys():
            yield f"a core imports {name}"


@rule("common/ids.py", "\n" * 401)
def files_are_short(module: Module) -> Iterator[str]:
    lines = module.source.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{lines} lines"


@rule("common/ids.py", "def long():\n" + "    work()\n" * 70)
def functions_are_short(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name} has {lines} lines"


@rule("common/ids.py", '"""Too little."""\n' + "x = 1\n" * 30)
def modules_say_what_they_decide(module: Module) -> Iterator[str]:
    if module.package == "tests" or module.source.count("\n") <= BARE_MODULE_LINES_MAX:
        return
    docstring = ast.get_docstring(ast.parse(module.source)) or ""
    if docstring.count("\n") < 2:
        yield "the module's docstring has fewer than 3 lines"


@rule("common/queue.py", "")
def modules_do_not_shadow_the_standard_library(module: Module) -> Iterator[str]:
    stem = Path(module.path).stem
    if module.package != "tests" and stem in sys.stdlib_module_names - {"__init__", "__main__"}:
        yield f"{stem} is a module of the standard library"


@rule("common/ids.py", "def f(slot_idx): pass")
def names_are_full_words(module: Module) -> Iterator[str]:
    for node in module.nodes:
        name = ""
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name not in GIVEN_NAMES and BANNED_WORDS & set(name.lower().split("_")):
            yield f"line {node.lineno}: {name}"


@rule("transport/loop.py", "import time\nfrom datetime import datetime\ndatetime.now()")
def clocks_are_read_in_one_place(module: Module) -> Iterator[str]:
    if module.path in ("common/clock.py", "scripts/bench.py"):
        return
    yield from (f"imports {name}" for name in module.imports if name == "time")
    for call in module.calls:
        if ast.unparse(call.func) in ("datetime.now", "datetime.utcnow", "datetime.datetime.now"):
            yield f"line {call.lineno}: {ast.unparse(call.func)}"


@rule("common/messages.py", "class Submit:\n    sent_at: int")
def messages_carry_durations(module: Module) -> Iterator[str]:
    if module.path != "common/messages.py":
        return
    for node in module.nodes:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target).endswith("_at"):
            yield f"line {node.lineno}: {ast.unparse(node.target)} is an instant"


@rule("decode_node/core.py", "deque(maxlen=4)\nqueue.Queue()\nqueue.SimpleQueue()")
def queues_are_bounded_and_lose_nothing(module: Module) -> Iterator[str]:
    for call in module.calls:
        name = ast.unparse(call.func)
        bounded = bool(call.args or call.keywords)
        unbounded = name.split(".")[-1] == "SimpleQueue" and module.path != "transport/loop.py"
        if unbounded or (name in ("queue.Queue", "Queue") and not bounded):
            yield f"line {call.lineno}: {name} has no bound"
        if PURE.fullmatch(module.path) and any(keyword.arg == "maxlen" for keyword in call.keywords):
            yield f"line {call.lineno}: {name} drops silently"


@rule("decode_node/node.py", "context.socket(1)")
def sockets_are_made_in_one_place(module: Module) -> Iterator[str]:
    if module.package not in SHIPPED or module.path == "transport/zmq_sockets.py":
        return
    for call in module.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "socket":
            yield f"line {call.lineno}: {ast.unparse(call.func)}"


@rule("common/ids.py", "print(1)\neval('1')\nimport pickle\nsocket.recv_pyobj()")
def nothing_prints_or_runs_foreign_code(module: Module) -> Iterator[str]:
    yield from (
        f"imports {name}" for name in module.imports if name in ("pickle", "marshal", "shelve", "dill")
    )
    for call in module.calls:
        name = ast.unparse(call.func)
        if name in ("eval", "exec") or name.endswith(("_pyobj",)):
            yield f"line {call.lineno}: {name}"
        if name == "print" and module.package != "scripts":
            yield f"line {call.lineno}: print"


@rule(
    "transport/codec.py",
    "__import__(name)\nimportlib.import_module(name)\ngetattr(messages, name)\nglobals()[name]\n"
    "torch.load(path)\nnp.load(path, allow_pickle=True)\nyaml.load(text)\ncompile(text, '', 'exec')",
)
def nothing_is_looked_up_or_loaded_by_a_foreign_name(module: Module) -> Iterator[str]:
    if module.package not in SHIPPED:
        return
    for node in module.nodes:
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("globals()", "locals()", "vars()"):
            yield f"line {node.lineno}: {ast.unparse(node)}"
    for call in module.calls:
        name = ast.unparse(call.func)
        literal = bool(call.args) and isinstance(call.args[0], ast.Constant)
        by_name = name.split(".")[-1] in ("__import__", "import_module") and not literal
        # An attribute of a module or class, by a name that is not written here.
        of_module = name == "getattr" and len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)
        of_module = of_module and ast.unparse(call.args[0]).split(".")[-1] in _imported(module)
        unsafe = name in ("torch.load", "yaml.load", "compile") or "allow_pickle=True" in ast.unparse(call)
        if by_name or of_module or unsafe:
            yield f"line {call.lineno}: {name}"


def _imported(module: Module) -> set[str]:
    """Names of modules and classes that a module imports, and `messages`, whatever it is called there."""
    names = {"messages"}
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@rule("transport/codec.py", "assert header")
def shipped_code_does_not_assert(module: Module) -> Iterator[str]:
    # Asserts vanish under -O; common.errors.check does not.
    if module.package in SHIPPED:
        yield from (f"line {node.lineno}: assert" for node in module.nodes if isinstance(node, ast.Assert))


@rule("common/ids.py", "try:\n    work()\nexcept Exception:\n    pass")
def errors_are_not_swallowed(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
        silent = all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
        if node.type is None or (broad and silent):
            yield f"line {node.lineno}: an error is swallowed"


@rule("common/ids.py", "# FIX" + "ME: later")
def nothing_is_left_for_later(module: Module) -> Iterator[str]:
    yield from (f"says {match.group()}" for match in UNFINISHED.finditer(module.source))


def _modules() -> list[Module]:
    paths = (path for package in LAYERS for path in sorted((ROOT / package).rglob("*.py")))
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


RULE_IDS = [function.__name__ for function, _ in RULES]


@pytest.mark.parametrize("function", [function for function, _ in RULES], ids=RULE_IDS)
def test_every_module_keeps_the_rule(function: Rule) -> None:
    faults = [f"{module.path}: {fault}" for module in _modules() for fault in function(module)]
    assert faults == []


@pytest.mark.parametrize(("function", "offender"), RULES, ids=RULE_IDS)
def test_the_rule_finds_what_breaks_it(function: Rule, offender: Module) -> None:
    assert list(function(offender))


def test_the_walk_reaches_every_layer() -> None:
    packages = {module.package for module in _modules()}
    assert packages >= {*SHIPPED, "tests"}
