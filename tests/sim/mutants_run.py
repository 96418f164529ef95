"""The general run: what the product must pass and every mutant must fail.

Decides what "caught" means for `tests.sim.test_mutants`. `python -m tests.sim.mutants_run NAME` imports the
product with the mutant NAME applied, in memory, runs the general run and ends with 3 and the finding, or with
0 when nothing was found; without NAME the product itself is run. It must never know what a mutant is about.
"""

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from tests.sim.mutants import HAND_MADE, patched_source
from tests.sim.mutants_drawn import draw, drawn_source

CAUGHT, SURVIVED = 3, 0
DRAWN_COUNT = 5
SEEDS = range(40)


class _PatchedLoader(SourceFileLoader):
    """Compiles another text than the file holds."""

    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class PatchedModule(MetaPathFinder):
    """Finds one module with its source replaced."""

    def __init__(self, module: str, text: str) -> None:
        self._module = module
        self._text = text

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        spec.loader = _PatchedLoader(fullname, spec.origin, self._text)
        return spec


def mutant_named(name: str) -> tuple[str, str]:
    """The module of a mutant and its patched source. Raises LookupError for a name that nobody has."""
    for mutant in HAND_MADE:
        if mutant.name == name:
            return mutant.module, patched_source(mutant)
    for site in draw(DRAWN_COUNT):
        if site.name == name:
            return site.module, drawn_source(site)
    raise LookupError(f"no mutant is called {name!r}")


def findings() -> Iterator[str]:
    """What the general run finds wrong, seeds first: they take a tenth of the time of exploration."""
    # Imported here: by now the mutant is in place.
    from tests.sim.explore import Exploration, Violation
    from tests.sim.explore_scenarios import GENERAL
    from tests.sim.runs import Run, SimulationFailed

    for seed in SEEDS:
        try:
            Run(seed).complete()
        except SimulationFailed as failure:
            yield f"seed {seed}: {str(failure).splitlines()[0]}"
    for scenario in GENERAL:
        try:
            Exploration(scenario).complete()
        except Violation as violation:
            yield f"exploration of {scenario.name!r}: {str(violation).splitlines()[0]}"


def main(names: list[str]) -> int:
    for name in names:
        module, text = mutant_named(name)
        sys.meta_path.insert(0, PatchedModule(module, text))
    finding = next(findings(), None)
    sys.stdout.write(f"{finding}\n" if finding else "")
    return CAUGHT if finding else SURVIVED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
