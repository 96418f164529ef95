"""The page: its files are served, need nothing from outside, and read what /state says.

No browser runs here: that the picture looks right is for eyes. What a script reads is held to a real answer.
"""

import re

import pytest

from decode_node.gateway.app import PAGE
from tests.gateway.harness import GatewayProcess

FILES = sorted(path.name for path in PAGE.iterdir())


def test_the_page_is_served_with_every_file_that_it_names(gateway: GatewayProcess) -> None:
    page = gateway.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    named = re.findall(r'(?:href|src)="/page/([^"]+)"', page.text)
    assert sorted([*named, "index.html"]) == FILES
    for name in named:
        answer = gateway.get(f"/page/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] in ("text/css", "text/javascript")


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_outside_and_no_answer_becomes_markup(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_element_that_a_script_looks_for_is_there() -> None:
    scripts = "".join((PAGE / name).read_text(encoding="utf-8") for name in FILES if name.endswith(".js"))
    wanted = set(re.findall(r'element\("([\w-]+)"\)', scripts)) | {"ttft", "gap"}
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert wanted <= set(re.findall(r'id="([\w-]+)"', page))


def test_state_has_what_the_page_reads(gateway: GatewayProcess) -> None:
    body = {"model": "emulated-0", "prompt": "abc", "max_tokens": 4}
    assert gateway.post("/v1/completions", body).status_code == 200
    state = gateway.get("/state").json()
    script = (PAGE / "state.js").read_text(encoding="utf-8")
    assert set(re.findall(r"\bstate\.(?!decode)(\w+)", script)) - {"length"} <= {*state, "state", "ready"} | {
        "age_ms"
    }
    decode = state["decode"]
    read = set(re.findall(r"\bdecode\.(\w+)", script))
    assert read - {"ready", "model", "max_tokens"} <= set(decode)
    worker = decode["workers"][0]
    assert set(re.findall(r"\bworker\.(\w+)", script)) - {"replace"} <= set(worker)
    assert set(re.findall(r"\bslot\.(\w+)", script)) <= set(worker["slots"][0])
    assert set(re.findall(r"\blane\.(\w+)", script)) <= set(decode["lanes"][0])
    assert set(re.findall(r"\bjob\.(\w+)", script)) <= set(state["ended"][-1])
    assert set(re.findall(r"\btimings\.(\w+)", script)) <= set(state["ended"][-1]["timings"])
