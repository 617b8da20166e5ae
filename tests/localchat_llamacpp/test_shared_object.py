"""A library that cannot be loaded is refused in a sentence, with the command that helps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localchat.errors import LocalchatError
from localchat_llamacpp.shared_object import _explained, load, section
from tests.support.fake_llamacpp import build, compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries in ELF")

AGAIN = "Install it again."
SOURCE = 'const char answer[] = "forty-two"; int f(void) { return 42; }'


def _refusal(file: Path) -> LocalchatError:
    with pytest.raises(LocalchatError) as caught:
        load(file, AGAIN)
    return caught.value


def test_a_whole_library_is_loaded_and_its_sections_read(tmp_path: Path) -> None:
    file = build(tmp_path / "f.so", SOURCE)
    assert load(file).f() == 42
    assert b"forty-two\0" in section(file, ".rodata")
    assert b"answer\0" in section(file, ".dynstr")
    text = tmp_path / "text"
    text.write_text("no library")
    assert section(text, ".rodata") == b"no library"


def test_a_library_that_was_cut_short_is_never_mapped(tmp_path: Path) -> None:
    file = build(tmp_path / "f.so", SOURCE)
    data = file.read_bytes()
    for size in (70, 600, 0x2100):
        file.write_bytes(data[:size])
        problem = _refusal(file)
        assert f"f.so is cut short: it has {size:,} bytes of at least " in problem.message
        assert problem.hint == AGAIN


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (18, 21, "was built for machine 21, and this machine is "),
        (4, 1, "is not for 64-bit little-endian machines"),
        (0, 0, "is not a shared library"),
    ],
    ids=["machine", "bits", "magic"],
)
def test_a_library_for_another_machine_is_told(
    place: int, value: int, words: str, tmp_path: Path
) -> None:
    file = build(tmp_path / "f.so", SOURCE)
    data = bytearray(file.read_bytes())
    data[place] = value
    file.write_bytes(data)
    assert words in _refusal(file).message


def test_an_empty_file_a_folder_and_no_file_have_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "empty.so").touch()
    assert "is not a shared library" in _refusal(tmp_path / "empty.so").message
    assert "cannot be read: Is a directory" in _refusal(tmp_path).message
    assert "cannot be read: No such file" in _refusal(tmp_path / "missing.so").message


def test_a_library_that_calls_what_nothing_has_is_told_by_the_name(tmp_path: Path) -> None:
    file = build(tmp_path / "f.so", "int nowhere(void); int f(void) { return nowhere(); }")
    assert "undefined symbol: nowhere" in _refusal(file).message


def test_a_library_that_is_missing_is_told_as_the_loader_tells_it(tmp_path: Path) -> None:
    other = build(tmp_path / "libother.so", "int other(void) { return 1; }")
    file = build(
        tmp_path / "f.so",
        "int other(void); int f(void) { return other(); }",
        f"-L{tmp_path}",
        "-lother",
    )
    other.unlink()
    problem = _refusal(file)
    assert problem.message == f"llama.cpp needs libother.so, which is not installed ({file})."
    assert problem.hint == "Install the package of this system that has libother.so."


def test_a_missing_libgomp_is_told_with_the_package_of_debian() -> None:
    problem = "libgomp.so.1: cannot open shared object file: No such file or directory"
    found = _explained(Path("/x.so"), problem, "")
    assert found.message == "llama.cpp needs libgomp.so.1, which is not installed (/x.so)."
    assert "apt install libgomp1" in found.hint


@pytest.mark.parametrize("needed", ["GLIBC_2.99", "GLIBCXX_3.4.99", "GOMP_9.0"])
def test_a_system_that_is_too_old_builds_llamacpp_itself(needed: str) -> None:
    loader = f"/lib64/libc.so.6: version `{needed}' not found (required by /x.so)"
    found = _explained(Path("/x.so"), loader, "")
    assert found.message == f"/x.so cannot be loaded: {loader}"
    assert "localchat doctor --rebuild" in found.hint


def test_a_card_without_its_driver_leaves_the_way_without_it() -> None:
    problem = "libcuda.so.1: cannot open shared object file: No such file or directory"
    found = _explained(Path("/x.so"), problem, "")
    assert "LOCALCHAT_LLAMACPP_LIBRARY=xllamacpp" in found.hint


_WRITER = """
#include <sstream>
extern "C" int {calls};
extern "C" int {name}(long n) {{ std::stringstream s; s << n; return (int)s.str().size(){more}; }}
"""
_COUNT = "import ctypes, sys; from pathlib import Path\n{first}\nprint({load}.digits(ctypes.c_long(12345)))"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that writes numbers to streams, behind one that exports parts of libstdc++ of its own.

    So was llama.cpp where the compiler of the CUDA part linked that library into it. The parts are made weak,
    as symbols without GNU's unique objects are."""
    folder = tmp_path_factory.mktemp("mixed")
    named = [compiler("g++"), "-print-file-name=libstdc++.a"]
    archive = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(archive).is_file():
        pytest.skip("no libstdc++.a here to build the library of this test")
    parts = folder / "parts.a"
    subprocess.run([compiler("objcopy"), "--weaken", archive, str(parts)], check=True)
    inner = _WRITER.format(calls="unused()", name="inner", more="")
    # gcc, for g++ would add the shared library.
    build(
        folder / "inner.so", inner, "-xnone", str(parts), "-lm", "-lgcc_s", language="cpp", by="gcc"
    )
    outer = _WRITER.format(calls="inner(long)", name="digits", more=" + 0 * inner(n)")
    return build(folder / "outer.so", outer, str(folder / "inner.so"), language="cpp")


def _count(load: str, first: str, file: Path) -> subprocess.CompletedProcess[str]:
    code = _COUNT.format(first=first, load=load)
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize("first", ["", "import numpy"], ids=["alone", "after numpy"])
def test_a_library_with_a_libstdcpp_of_its_own_meets_the_systems(first: str, mixed: Path) -> None:
    plain = _count("ctypes.CDLL(sys.argv[1])", first, mixed)
    if plain.returncode == 0:
        pytest.skip("this system's loader keeps the two copies apart by itself")
    used = _count(
        "__import__('localchat_llamacpp.shared_object').shared_object.load(Path(sys.argv[1]))",
        first,
        mixed,
    )
    assert (used.returncode, used.stdout) == (0, "5\n"), used.stderr
