"""Finds the llama.cpp libraries of this machine, and chooses one. Loads none of them.

Sources, in order:

1. the user's choice: the setting `llamacpp_library`, which front ends pass on as the variable
   `LOCALCHAT_LLAMACPP_LIBRARY`; a file, a folder, or the name of a source below,
2. `native`: a build by `localchat doctor --rebuild`, in `native_build_folder`,
3. `llama-cpp-python`: compiled by its installation for this machine,
4. `xllamacpp`: prebuilt for every CPU of the last ten years, and for no GPU but Apple's.

A process loads one library, so a process has one choice, and its children inherit it by the variable.
"""

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from localchat.config.paths import find_paths

Source: TypeAlias = Literal["named", "native", "llama-cpp-python", "xllamacpp"]

VARIABLE: Final = "LOCALCHAT_LLAMACPP_LIBRARY"
BINDING: Final = "llama-cpp-python"
BINDING_VERSION: Final = "0.3.36"
"""Release of llama-cpp-python whose llama.cpp is built here."""
PREBUILT: Final = "xllamacpp"
RECORD: Final = "build.json"
"""In `native_build_folder`: {"library": path in the folder, "version": text, "kind": text}."""

_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")
_PREBUILT_CPU: Final = ("avx", "avx2", "bmi2", "f16c", "fma")
"""Instruction sets that the prebuilt library for x86-64 uses without asking."""


class LibraryFile(NamedTuple):
    """A library of llama.cpp."""

    source: Source
    file: Path
    version: str
    """Version of the package, or the state of a named file."""
    why: str
    """Sentence on why this library was chosen."""

    @property
    def name(self) -> str:
        """Name of the package."""
        if self.source == "named":
            return "llama.cpp"
        return self.source

    @property
    def title(self) -> str:
        """Name and version for people."""
        match self.source:
            case "named":
                return str(self.file)
            case "native":
                return f"The native build of {BINDING} {self.version}"
        return f"{self.source} {self.version}"

    @property
    def again(self) -> str:
        """Sentence on how to replace a damaged file."""
        match self.source:
            case "named":
                return f"Name another library with {VARIABLE}, or none."
            case "native":
                return "Build it again with `localchat doctor --rebuild`."
        options = "--force-reinstall --no-deps --no-cache-dir"
        return f"Install it again: pip install {options} {self.source}=={self.version}"


class Search(NamedTuple):
    """The library to load, or the reasons against each candidate."""

    library: LibraryFile | None
    passed_over: tuple[str, ...] = ()
    """Sentences on the libraries that were rejected before."""
    hint: str = ""
    """Advice to the user, if no library is usable."""


class _Unusable(Exception):
    """A source has an unusable library. The text is a sentence."""


def find_library(environ: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> Search:
    """Return the first usable library. Takes a millisecond. root: the folder with /proc."""
    requested = environ.get(VARIABLE, "").strip()
    if requested and requested not in _SOURCES:
        return _named(Path(requested).expanduser())
    rejections: list[str] = []
    names = [requested] if requested else list(_SOURCES)
    for name in names:
        try:
            library = _SOURCES[name](environ, root)
        except _Unusable as problem:
            rejections.append(str(problem))
            continue
        if library is not None:
            why = f"{VARIABLE} asks for it." if requested else library.why
            return Search(library._replace(why=why), tuple(rejections))
    if requested and not rejections:
        rejections.append(f"{VARIABLE} asks for {requested}, which is not installed.")
    return Search(None, tuple(rejections), _advice(requested))


def native_build_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the build by `doctor --rebuild`, whether or not it exists.

    It contains the library with its dependencies, and `RECORD`, which is written last. Without the record the
    folder counts as empty. An unreadable record or a missing library is rejected with a sentence.
    """
    return find_paths(environ).data_dir / "llama.cpp"


def _named(path: Path) -> Search:
    file = next((path / name for name in _NAMES if (path / name).is_file()), path)
    if file.is_file():
        return Search(LibraryFile("named", file.absolute(), _state(file), f"{VARIABLE} names it."))
    problem = "does not exist"
    if path.is_dir():
        problem = "is a folder without libllama"
    return Search(
        None,
        (f"{VARIABLE} or --llamacpp-library names {path}, which {problem}.",),
        f"Name a libllama, or one of {', '.join(_SOURCES)}; otherwise localchat looks for one itself.",
    )


def _state(file: Path) -> str:
    """Return the state of a file, which distinguishes versions at one path."""
    state = file.stat()
    return f"{state.st_size:x}-{state.st_mtime_ns:x}"


def _native(environ: Mapping[str, str], root: Path) -> LibraryFile | None:
    folder = native_build_folder(environ)
    record = folder / RECORD
    if not record.is_file():
        return None
    import json  # only needed if there is a build

    try:
        build = json.loads(record.read_text(encoding="utf-8"))
        file = folder / str(build["library"])
        built_version = str(build["version"])
        kind = str(build["kind"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _Unusable(f"{record} cannot be read ({problem}): build it again.") from problem
    if not file.is_file():
        raise _Unusable(f"The native build in {folder} lacks its library: build it again.")
    if built_version != BINDING_VERSION:
        raise _Unusable(
            f"The native build is of {BINDING} {built_version}, and this localchat builds {BINDING_VERSION}: "
            "`localchat doctor --rebuild` builds it again."
        )
    return LibraryFile(
        "native", file, f"{built_version} for {kind}", "It was built for this machine."
    )


def _binding(environ: Mapping[str, str], root: Path) -> LibraryFile | None:
    installed, folder = _installed(BINDING, "llama_cpp")
    if folder is None:
        return None
    files = (folder / "lib" / name for name in _NAMES)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise _Unusable(f"{BINDING} {installed} is installed without its native library.")
    why = "It was compiled for this machine when it was installed."
    return LibraryFile("llama-cpp-python", file, installed, why)


def _prebuilt(environ: Mapping[str, str], root: Path) -> LibraryFile | None:
    installed, folder = _installed(PREBUILT, PREBUILT)
    if folder is None:
        return None
    file = next(iter(sorted(folder.glob("xllamacpp*.so"))), None)
    if file is None:
        raise _Unusable(f"{PREBUILT} {installed} is installed without a library to call.")
    if missing := _missing_features(root):
        raise _Unusable(
            f"{PREBUILT} {installed} needs a processor with {', '.join(missing).upper()}, "
            "which this one lacks."
        )
    why = "It came with localchat; none was built for this machine."
    return LibraryFile("xllamacpp", file, installed, why)


_SOURCES: Final[Mapping[str, Callable[[Mapping[str, str], Path], LibraryFile | None]]] = {
    "native": _native,
    BINDING: _binding,
    PREBUILT: _prebuilt,
}


def _installed(package: str, module: str) -> tuple[str, Path | None]:
    """Return the installed version of a package, and the folder of its module. None without one."""
    try:
        metadata = distribution(package).read_text("METADATA") or ""
    except PackageNotFoundError:
        return "", None
    # `importlib.metadata.version` parses the whole description, and `fit` asks a hundred times.
    version = metadata.partition("\nVersion:")[2].partition("\n")[0].strip()
    spec = find_spec(module)
    if not version or spec is None or not spec.submodule_search_locations:
        return version, None
    return version, Path(next(iter(spec.submodule_search_locations)))


def _missing_features(root: Path) -> list[str]:
    """Return the instruction sets that the prebuilt library needs and this CPU lacks.

    Empty if the CPU's features are unknown. Without this check, the first matrix would end the process with
    SIGILL.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    from localchat.fit.hardware import read_cpu_flags

    flags = read_cpu_flags(root)
    return [name for name in _PREBUILT_CPU if flags and name not in flags]


def _advice(requested: str) -> str:
    if requested == "native":
        return "Build it with `localchat doctor --rebuild`."
    return f"Install one: pip install {BINDING} (compiles llama.cpp: some minutes, needs a C++ compiler)."
