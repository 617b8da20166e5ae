"""Where the library comes from, in which order, and what is said of it."""

import json
import sys
from pathlib import Path

import pytest

from localchat_llamacpp.library_source import (
    RECORD,
    VARIABLE,
    Search,
    find_library,
    native_build_folder,
)

CPU = "flags : fpu avx avx2 bmi2 f16c fma\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages, the only one on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return folder


def _install(site: Path, distribution: str, release: str, *files: str) -> None:
    record = site / f"{distribution.replace('-', '_')}-{release}.dist-info"
    record.mkdir()
    description = "A text of many lines.\nVersion: 0 was another one.\n"
    (record / "METADATA").write_text(f"Name: {distribution}\nVersion: {release}\n\n{description}")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


def _binding(site: Path) -> None:
    _install(
        site, "llama-cpp-python", "0.3.36", "llama_cpp/__init__.py", "llama_cpp/lib/libllama.so"
    )


def _prebuilt(site: Path) -> None:
    _install(site, "xllamacpp", "2026.10", "xllamacpp/__init__.py", "xllamacpp/xllamacpp.abi3.so")


def _native(tmp_path: Path, **record: str) -> Path:
    folder = tmp_path / "data/llama.cpp"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/libllama.so").touch()
    known = {"library": "lib/libllama.so", "version": "0.3.36", "kind": "cpu", **record}
    (folder / RECORD).write_text(json.dumps(known))
    return folder


def _search(tmp_path: Path, cpu: str = CPU, **environ: str) -> Search:
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/cpuinfo").write_text(cpu)
    return find_library({"LOCALCHAT_DATA_DIR": str(tmp_path / "data"), **environ}, root=tmp_path)


def test_a_machine_without_any_is_told_what_to_install(site: Path, tmp_path: Path) -> None:
    found = _search(tmp_path)
    assert found.library is None
    assert found.passed_over == ()
    assert "pip install llama-cpp-python" in found.hint


def test_each_source_goes_before_the_next(site: Path, tmp_path: Path) -> None:
    titles, again = [], []
    for install in (_prebuilt, _binding, lambda site: _native(tmp_path)):
        install(site)
        library = _search(tmp_path).library
        assert library is not None
        titles.append(library.title)
        again.append(library.again)
    assert titles == [
        "xllamacpp 2026.10",
        "llama-cpp-python 0.3.36",
        "The native build of llama-cpp-python 0.3.36 for cpu",
    ]
    assert again[0].endswith(
        "pip install --force-reinstall --no-deps --no-cache-dir xllamacpp==2026.10"
    )
    assert "doctor --rebuild" in again[2]
    file = tmp_path / "own.so"
    file.touch()
    library = _search(tmp_path, **{VARIABLE: str(file)}).library
    assert library is not None
    assert (library.title, library.file) == (str(file), file)
    assert VARIABLE in library.why


@pytest.mark.parametrize("name", ["native", "llama-cpp-python", "xllamacpp"])
def test_a_source_can_be_asked_for_by_its_name(name: str, site: Path, tmp_path: Path) -> None:
    absent = _search(tmp_path, **{VARIABLE: name})
    assert absent.library is None
    assert absent.passed_over == (f"{VARIABLE} asks for {name}, which is not installed.",)
    _prebuilt(site)
    _binding(site)
    _native(tmp_path)
    library = _search(tmp_path, **{VARIABLE: name}).library
    assert library is not None
    assert (library.source, library.why) == (name, f"{VARIABLE} asks for it.")


def test_a_folder_stands_for_the_library_in_it(site: Path, tmp_path: Path) -> None:
    folder = _native(tmp_path) / "lib"
    library = _search(tmp_path, **{VARIABLE: str(folder)}).library
    assert library is not None
    assert library.file == folder / "libllama.so"


def test_a_path_without_a_library_is_refused_and_nothing_else_taken(
    site: Path, tmp_path: Path
) -> None:
    _prebuilt(site)
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("none.so", "which does not exist"),
        ("empty", "a folder without libllama"),
    ):
        found = _search(tmp_path, **{VARIABLE: str(tmp_path / name)})
        assert found.library is None
        assert words in found.passed_over[0]
        assert "xllamacpp" in found.hint


def test_another_file_under_the_same_path_has_another_version(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.so"
    versions = set()
    for text in ("a", "bb"):
        file.write_text(text)
        library = _search(tmp_path, **{VARIABLE: str(file)}).library
        assert library is not None
        versions.add(library.version)
    assert len(versions) == 2


@pytest.mark.parametrize("damage", ["record", "library", "field"])
def test_a_native_build_that_is_damaged_is_passed_over_with_a_sentence(
    damage: str, site: Path, tmp_path: Path
) -> None:
    _prebuilt(site)
    folder = _native(tmp_path)
    assert folder == native_build_folder({"LOCALCHAT_DATA_DIR": str(tmp_path / "data")})
    if damage == "library":
        (folder / "lib/libllama.so").unlink()
    else:
        (folder / RECORD).write_text("{" if damage == "record" else "{}")
    found = _search(tmp_path)
    assert found.library is not None
    assert found.library.source == "xllamacpp"
    assert "build it again" in found.passed_over[0]
    (folder / RECORD).unlink()
    assert _search(tmp_path).passed_over == ()


def test_a_package_without_its_library_is_passed_over_with_a_sentence(
    site: Path, tmp_path: Path
) -> None:
    _install(site, "llama-cpp-python", "0.3.36", "llama_cpp/__init__.py")
    _prebuilt(site)
    found = _search(tmp_path)
    assert found.library is not None
    assert found.library.source == "xllamacpp"
    assert found.passed_over == (
        "llama-cpp-python 0.3.36 is installed without its native library.",
    )


def test_a_processor_that_the_prebuilt_library_would_die_on_is_told(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prebuilt(site)
    found = _search(tmp_path, "flags : fpu avx\n")
    assert found.library is None
    assert found.passed_over == (
        "xllamacpp 2026.10 needs a processor with AVX2, BMI2, F16C, FMA, which this one lacks.",
    )
    assert "pip install llama-cpp-python" in found.hint
    # Where the processor cannot be read, or is of another kind, nothing is held against it.
    assert _search(tmp_path, "").library is not None
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert _search(tmp_path, "flags : fpu\n").library is not None


def test_a_build_of_another_version_is_passed_over_for_the_one_that_came_with_localchat(
    site: Path, tmp_path: Path
) -> None:
    _prebuilt(site)
    _native(tmp_path, version="0.3.35")
    found = _search(tmp_path)
    assert found.library is not None and found.library.source == "xllamacpp"
    assert "0.3.35" in found.passed_over[0] and "doctor --rebuild" in found.passed_over[0]
