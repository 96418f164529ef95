"""The general run passes the product and catches every mutant; see `tests.sim.mutants_run`."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sim.mutants import HAND_MADE, ROOT, patched_source, source_of
from tests.sim.mutants_drawn import PASSED_OVER, all_sites, draw, drawn_source
from tests.sim.mutants_run import CAUGHT, DRAWN_COUNT, SURVIVED, mutant_named

DRAWN = [site.name for site in draw(DRAWN_COUNT)]
NAMES = [mutant.name for mutant in HAND_MADE] + DRAWN
Outcomes = dict[str, tuple[int, str]]


def general_run(*names: str) -> tuple[int, str]:
    """Exit status and finding of the general run, with mutants applied."""
    command = [sys.executable, "-m", "tests.sim.mutants_run", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Of the product, by the empty name, and of every mutant; two at a time."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        product = pool.submit(general_run)
        return dict(zip(NAMES, pool.map(general_run, NAMES), strict=True)) | {"": product.result()}


def test_the_product_passes_the_general_run(outcomes: Outcomes) -> None:
    assert outcomes[""] == (SURVIVED, "")


@pytest.mark.parametrize("name", NAMES)
def test_the_general_run_catches(name: str, outcomes: Outcomes) -> None:
    status, finding = outcomes[name]
    assert status == CAUGHT, finding or f"{name} was not found"


@pytest.mark.parametrize("mutant", HAND_MADE, ids=lambda mutant: mutant.name)
def test_a_mutant_is_source_that_compiles_and_differs(mutant) -> None:
    patched = patched_source(mutant)
    compile(patched, mutant.module, "exec")
    assert patched != source_of(mutant.module)


def test_five_mutants_are_drawn_and_each_is_another_program() -> None:
    sites = draw(DRAWN_COUNT)
    assert len({drawn_source(site) for site in sites}) == DRAWN_COUNT
    assert {site.kind for site in draw(40)} == {"negate", "drop"}
    assert len(set(NAMES)) == len(HAND_MADE) + DRAWN_COUNT
    assert [mutant_named(site.name)[0] for site in sites] == [site.module for site in sites]


def test_what_is_passed_over_exists_and_has_a_reason() -> None:
    known = {site.name for site in all_sites()}
    assert known >= PASSED_OVER.keys()
    assert all(len(reason.split()) > 3 for reason in PASSED_OVER.values())
