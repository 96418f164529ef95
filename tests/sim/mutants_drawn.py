"""Mutants drawn by a seed: a guard negated, or an effect dropped, anywhere in the pure modules.

Decides which faults the simulator has to find that nobody thought of. Asked by the test of the mutants. Sites
are ranked by a digest of the seed and of the site's own text, so that a change elsewhere does not draw anew.
A site that cannot be told from the product is passed over, with the reason in `PASSED_OVER`.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.sim.mutants import source_of

SEED = 3
PURE_MODULES = (
    "decode_node.core",
    "decode_node.desk",
    "decode_node.handoff",
    "decode_node.lane_work",
    "decode_node.lanes",
    "decode_node.scheduler",
    "decode_node.slots",
    "decode_node.stack",
    "decode_node.timers",
    "decode_node.worker",
    "decode_node.workers",
    "prefill_node.core",
    "prefill_node.grants",
    "prefill_node.line",
    "prefill_node.stack",
    "transport.bulk",
    "transport.connector",
    "transport.listener",
    "transport.peers",
)

PASSED_OVER: dict[str, str] = {
    "transport.connector._on_bad_frame: drop [*self._give_up_attempt(now_ms), AttemptRefused(refusal)]": (
        "answers a peer of another protocol version, and simulated nodes are all of one version"
    ),
}
"""Name of a site: why no run can tell it from the product, or why its fault is not one of the hand-off."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One site. name: module, function, what is done, and to which line."""

    name: str
    module: str
    kind: str
    line: int
    column: int


class _Change(ast.NodeTransformer):
    def __init__(self, site: Drawn) -> None:
        self._site = site

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        here = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if here != (self._site.line, self._site.column):
            return node
        if isinstance(node, ast.If) and self._site.kind == "negate":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Return) and self._site.kind == "drop":
            node.value = ast.List([], ast.Load())
        elif isinstance(node, (ast.AugAssign, ast.Expr)) and self._site.kind == "drop":
            return ast.Pass()
        return node


def drawn_source(site: Drawn) -> str:
    """The source of the site's module with the one change made."""
    tree = ast.parse(source_of(site.module))
    return ast.unparse(ast.fix_missing_locations(_Change(site).visit(tree)))


def draw(count: int, seed: int = SEED) -> list[Drawn]:
    """The first `count` sites by rank that are not passed over."""
    sites = sorted(all_sites(), key=lambda site: hashlib.sha256(f"{seed} {site.name}".encode()).digest())
    return [site for site in sites if site.name not in PASSED_OVER][:count]


def all_sites() -> Iterator[Drawn]:
    for module in PURE_MODULES:
        for owner in ast.walk(ast.parse(source_of(module))):
            if isinstance(owner, ast.FunctionDef):
                yield from _sites_of(module, owner)


def _sites_of(module: str, function: ast.FunctionDef) -> Iterator[Drawn]:
    returns_effects = function.returns is not None and "list[Any]" in ast.unparse(function.returns)
    for node in ast.walk(function):
        match node:
            case ast.If():
                yield _site(module, function, node, "negate", node.test)
            case ast.AugAssign(target=ast.Name(id="effects"), value=value):
                yield _site(module, function, node, "drop", value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="effects"), attr="append"))):
                yield _site(module, function, node, "drop", node.value)
            case ast.Return(value=ast.List(elts=[_, *_])) if returns_effects:
                yield _site(module, function, node, "drop", node.value)


def _site(module: str, function: ast.FunctionDef, node: ast.stmt, kind: str, about: ast.expr) -> Drawn:
    name = f"{module}.{function.name}: {kind} {ast.unparse(about)}"
    return Drawn(name, module, kind, node.lineno, node.col_offset)
