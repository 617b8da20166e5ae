"""Search in the files of a folder, in a process of its own.

A regular expression of a model can take forever, and a thread that evaluates it cannot be stopped.
"""

import asyncio
import fnmatch
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localchat.documents.folder import SKIPPED
from localchat.tools.command import drain
from localchat.tools.root import FileContent, Root
from localchat.tools.tool import ToolError
from localchat.units import counted

_TIMEOUT_S: Final = 20.0
_MAX_FILES: Final = 20_000
_MAX_NAMED: Final = 5000
_MAX_MATCHES: Final = 100
_MAX_LINE: Final = 300
_SHOWN_LINES: Final = 60
"""Lines of a single file in which nothing matches."""
_MAX_FILE_BYTES: Final = 2 << 20
_NAMED_FILES: Final = 20
"""Files without a match that are named."""
_IGNORE_FILE: Final = ".gitignore"


class SearchArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pattern: Annotated[str, Meta(min_length=1, description="Regular expression. Case is ignored.")]
    path: Annotated[str, Meta(min_length=1, description="Folder or file to search in.")] = "."
    names_only: Annotated[bool, Meta(description="Search the names of files only.")] = False


async def search(root: Path, arguments: SearchArguments) -> str:
    """Return the matching lines with their places. Raises ToolError."""
    # `-I` keeps the working folder off the path: it may contain a module of any name.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from localchat.tools.search import main; main()"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", code),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        order = msgspec.json.encode((str(root), arguments))
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate(order)
    except TimeoutError as problem:
        raise ToolError(
            f"the search took more than {_TIMEOUT_S:g} s",
            hint="use a simpler pattern, or a smaller folder",
        ) from problem
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            await drain(process)
    status, _, text = output.decode("utf-8", "replace").partition("\n")
    if status != "ok":
        raise ToolError(text or "the search failed")
    return text


def main() -> None:
    """Read an order from stdin, search, and print the result. Runs in the search process."""
    folder, arguments = msgspec.json.decode(
        sys.stdin.buffer.read(), type=tuple[str, SearchArguments]
    )
    try:
        text = "ok\n" + _matches(Root(Path(folder)), arguments)
    except ToolError as problem:
        text = f"error\n{problem}"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


def _compiled(arguments: SearchArguments) -> re.Pattern[str]:
    """Compile the pattern. Small models also write wildcards, and texts with signs of an expression."""
    try:
        return re.compile(arguments.pattern, re.IGNORECASE)
    except re.error:
        literal = re.escape(arguments.pattern)
        if arguments.names_only:
            literal = fnmatch.translate(arguments.pattern)
        return re.compile(literal, re.IGNORECASE)


def _matches(root: Root, arguments: SearchArguments) -> str:
    pattern = _compiled(arguments)
    path = arguments.path
    notes: list[str] = []
    content: FileContent | None = None
    try:
        content = root.read(path)
    except ToolError:
        pass  # a folder, or a place that cannot be used, which `_files` reports
    else:
        if content is None:
            # Small models invent folders.
            notes.append(f"[There is no {path}, so the whole folder was searched.]")
            path = "."
    # The name of a single file is known, so its lines are meant.
    by_name = arguments.names_only and content is None
    lines: list[str] = []
    names: list[str] = []
    searched: list[str] = []
    rows = names if by_name else lines
    for name, folder, base in _files(root, path, is_file=content is not None):
        searched.append(name)
        if pattern.search(name):
            names.append(name)
        if not by_name:
            lines += _matching_lines(root, name, folder, base, pattern)
        if len(rows) >= _MAX_MATCHES or len(searched) >= _MAX_FILES:
            notes.append(f"[stopped after {counted(len(searched), 'file')}]")
            break
    if by_name:
        notes.append("[Only names were searched. read_file shows the text of a file.]")
    shown = rows or _instead(path, content, names, searched)
    return "\n".join((*shown[:_MAX_MATCHES], *notes))


def _instead(
    path: str, content: FileContent | None, names: Sequence[str], searched: Sequence[str]
) -> list[str]:
    """Return what helps a small model if no line matches: it would repeat the search."""
    if text := _text(content):
        return [f"No line of {path} matches. Its text:", *text.splitlines()[:_SHOWN_LINES]]
    if names:
        return ["No line matches, but these names of files do:", *names]
    result = f"No match in {counted(len(searched), 'file')}"
    if content is None and 0 < len(searched) <= _NAMED_FILES:
        return [f"{result}:", *searched]
    return [f"{result}."]


def files_named(root: Root, base: str) -> list[str]:
    """Return up to three files with this base name. Only the first 5,000 files count."""
    names = (
        name
        for name, _, other in islice(_files(root, "."), _MAX_NAMED)
        if other.casefold() == base.casefold()
    )
    with suppress(ToolError):
        return list(islice(names, 3))
    return []


def _matching_lines(
    root: Root, name: str, folder: int, base: str, pattern: re.Pattern[str]
) -> Iterator[str]:
    with suppress(ToolError):
        content = root.read_in(folder, base, name)
        for number, line in enumerate(_text(content).splitlines(), 1):
            if pattern.search(line):
                yield f"{name}:{number}: {line.strip()[:_MAX_LINE]}"


def _text(content: FileContent | None) -> str:
    """Return the text of a file. Empty for large and binary ones."""
    if content is None or len(content.data) > _MAX_FILE_BYTES or b"\0" in content.data[:8192]:
        return ""
    return content.data.decode("utf-8", "replace")


def _files(root: Root, path: str, *, is_file: bool = False) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the open folder and the base name of each file. Hidden and built ones are left out."""
    ignored = _ignore_patterns(root)
    top_name = root.relative(path)
    if is_file:
        parent, _, base = top_name.rpartition("/")
        with root.folder(parent or ".") as folder:
            yield top_name, folder, base
        return
    with root.folder(path) as top:
        for inner, folders, names, folder in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            prefix = os.path.normpath(os.path.join(top_name, inner))
            folders[:] = sorted(
                name for name in folders if not _is_ignored(ignored, prefix, name, folder=True)
            )
            for name in sorted(names):
                if not _is_ignored(ignored, prefix, name):
                    yield os.path.normpath(os.path.join(prefix, name)), folder, name


def _ignore_patterns(root: Root) -> tuple[str, ...]:
    """Return the patterns of the root's own .gitignore. Exceptions (`!`) are not supported."""
    content = root.read(_IGNORE_FILE)
    if content is None:
        return ()
    lines = content.data.decode("utf-8", "replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and line[0] not in "#!")


def _is_ignored(patterns: tuple[str, ...], prefix: str, name: str, *, folder: bool = False) -> bool:
    if name.startswith(".") or (folder and name in SKIPPED):
        return True
    path = os.path.normpath(os.path.join(prefix, name))
    for pattern in patterns:
        if pattern.endswith("/") and not folder:
            continue
        bare = pattern.strip("/")
        subject = path if "/" in pattern.rstrip("/") else name
        if fnmatch.fnmatch(subject, bare):
            return True
    return False
