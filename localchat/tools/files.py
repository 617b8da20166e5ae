"""Tools for the files of the root folder: read, list, search, and edit."""

import asyncio
import difflib
import os
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localchat.documents.pages import decoded, kind_of, read_document
from localchat.errors import LocalchatError
from localchat.tools.journal import Journal
from localchat.tools.root import FileContent, Root
from localchat.tools.search import SearchArguments, files_named, search
from localchat.tools.tool import NothingToDo, Plan, Tool, ToolError, own_tool
from localchat.units import counted, size

_LINES: Final = 200
"""Lines that a call reads unless it asks for others."""
_MAX_LINE: Final = 2000
_MAX_ENTRIES: Final = 400
_NEW_MODE: Final = 0o644
_PREVIEW_LINES: Final = 400
_Line = Annotated[int, Meta(ge=0)]
_Path = Annotated[str, Meta(min_length=1, description="Path relative to the working folder.")]


class ReadArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: _Path
    start_line: Annotated[_Line, Meta(description="First line, counted from 1.")] = 1
    end_line: Annotated[_Line, Meta(description="Last line. 0: the end.")] = 0


class ListArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: _Path = "."


class EditArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: _Path
    old_text: Annotated[
        str,
        Meta(
            description="Whole lines of the file to replace, exactly as read_file shows them. Empty to create "
            "a new file with new_text."
        ),
    ]
    new_text: Annotated[str, Meta(description="Lines that replace them.")]
    replace_all: Annotated[bool, Meta(description="Replace every occurrence.")] = False


def reading_tools(root: Root) -> tuple[Tool, ...]:
    """Return the tools that only read."""

    async def plan_read(arguments: ReadArguments) -> Plan:
        name = root.relative(arguments.path)
        first = max(1, arguments.start_line)
        last = arguments.end_line or first + _LINES - 1
        if last < first:
            raise ToolError("end_line is before start_line")
        title = f"{name}, from line {first}"
        if arguments.end_line:
            title = f"{name}, lines {first} to {last}"
        run = partial(asyncio.to_thread, _read, root, name, first, last)
        return _reading(run, title)

    async def plan_list(arguments: ListArguments) -> Plan:
        name = root.relative(arguments.path)
        return _reading(partial(asyncio.to_thread, _list, root, name), name)

    async def plan_search(arguments: SearchArguments) -> Plan:
        name = root.relative(arguments.path)
        run = partial(search, root.path, msgspec.structs.replace(arguments, path=name))
        return _reading(run, f"{arguments.pattern} in {name}")

    return (
        own_tool(
            "read_file",
            f"Read a text file, PDF or DOCX. Without a range: the first {_LINES} lines.",
            "read",
            ReadArguments,
            plan_read,
        ),
        own_tool("list_folder", "List the files of a folder.", "read", ListArguments, plan_list),
        own_tool(
            "search_files",
            "Search the lines of all files for a regular expression, or find files by name with "
            "names_only.",
            "read",
            SearchArguments,
            plan_search,
        ),
    )


def _reading(run: Callable[[], Awaitable[str]], title: str) -> Plan:
    return Plan(run, title, "read", "all reading in this folder")


def _existing(root: Root, name: str) -> FileContent:
    content = root.read(name)
    if content is None:
        hint = "list_folder shows the files of a folder"
        if same := files_named(root, name.rpartition("/")[2]):
            hint = f"there is {', '.join(same)}"
        raise ToolError(f"there is no file {name}", hint=hint)
    return content


def _read(root: Root, name: str, first: int, last: int) -> str:
    data = _existing(root, name).data
    try:
        if kind_of(name, data[:8192]) == "html":
            text = decoded(data)  # the source, which edit_file changes
        else:
            text = read_document(name, data).marked()
    except LocalchatError as problem:
        raise ToolError(f"{name} {problem.message}") from problem
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        return f"{name} is empty."
    if first > len(lines):
        raise ToolError(f"{name} has only {counted(len(lines), 'line')}")
    shown = [line[:_MAX_LINE] for line in lines[first - 1 : last]]
    body = "\n".join(shown)
    end = first + len(shown) - 1
    if first == 1 and end == len(lines):
        return body
    return f"Lines {first} to {end} of {len(lines)} of {name}:\n{body}"


def _list(root: Root, name: str) -> str:
    rows = []
    with root.folder(name) as folder:
        names = sorted(os.listdir(folder))
        for entry in names[:_MAX_ENTRIES]:
            try:
                status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                rows.append(f"{entry}/")
            elif stat.S_ISREG(status.st_mode):
                rows.append(f"{entry}  {size(status.st_size)}")
            elif stat.S_ISLNK(status.st_mode):
                rows.append(f"{entry}  (link, not followed)")
            else:
                rows.append(f"{entry}  (not a regular file)")
    if len(names) > _MAX_ENTRIES:
        rows.append(f"[{len(names) - _MAX_ENTRIES:,} more entries are left out]")
    return "\n".join(rows) or f"{name} is empty."


def editing_tool(root: Root, journal: Journal) -> Tool:
    """Return the tool that changes and creates files. `journal` records its writes."""

    async def plan_edit(arguments: EditArguments) -> Plan:
        name = root.relative(arguments.path)
        root.check_writable(name)
        before = await asyncio.to_thread(root.read, name)
        after = _edited(name, before, arguments)
        preview = _diff(name, before, after)

        async def write() -> str:
            # Not in a thread: a cancellation must not report a write as stopped that is still made.
            journal.write(root, name, after, before)
            if before is None:
                return f"Created {name}."
            return f"Changed {name}:\n{preview}"

        return Plan(write, name, "edit", "all edits in this folder", preview)

    return own_tool(
        "edit_file",
        "Replace an exact text in a file, or create a file. Read the file first.",
        "write",
        EditArguments,
        plan_edit,
    )


def _edited(name: str, before: FileContent | None, arguments: EditArguments) -> FileContent:
    """Return a file after its edit. Raises ToolError."""
    old = arguments.old_text
    new = arguments.new_text
    try:
        if before is None:
            if old:
                raise ToolError(
                    f"there is no file {name}", hint="an empty old_text creates the file"
                )
            return FileContent(new.encode(), _NEW_MODE)
        if kind_of("", before.data[:8192]) == "binary":
            raise ToolError(f"{name} is not a text file")
        text = before.data.decode()
        count = text.count(old) if old else 0
        if not count and "\r\n" in text:
            # Models see and write line breaks as a single character.
            old = old.replace("\r\n", "\n").replace("\n", "\r\n")
            new = new.replace("\r\n", "\n").replace("\n", "\r\n")
            count = text.count(old) if old else 0
        if not count and (similar := _similar_lines(text, old)):
            new = _indented_as(similar, old, new)
            old = similar
            count = 1
        if not count and _line_starts(text, new):
            # Small models repeat an edit that has succeeded.
            raise NothingToDo(
                f"{name} has new_text already, so nothing was changed",
                hint="if this is the change that the user wants, it is made; say so",
            )
        if not arguments.old_text:
            if text:
                raise ToolError(
                    f"{name} exists",
                    hint="call read_file, and give the lines to replace as old_text. To add lines, give the "
                    "line before them as old_text, and that line with the new ones as new_text",
                )
            return FileContent(new.encode(), before.mode)
        if not count:
            raise ToolError(
                f"old_text does not occur in {name}",
                hint="call read_file, and copy whole lines with their spaces as old_text",
            )
        if count > 1 and not arguments.replace_all:
            raise ToolError(
                f"old_text occurs {count} times in {name}",
                hint="add lines around it until it is unique, or set replace_all",
            )
        data = text.replace(old, new).encode()
    except UnicodeError as problem:
        raise ToolError(f"{name} is not UTF-8 text") from problem
    if data == before.data:
        raise ToolError("old_text and new_text are the same, so nothing would change")
    return FileContent(data, before.mode)


def _similar_lines(text: str, old: str) -> str:
    """Return the lines that differ from `old` only in indentation. Empty if they are not unique.

    Small models lose or add indentation. The diff that the user sees shows what is replaced.
    """
    starts = _line_starts(text, old)
    if len(starts) != 1:
        return ""
    lines = text.splitlines(keepends=True)
    return "".join(lines[starts[0] : starts[0] + len(old.strip().splitlines())])


def _line_starts(text: str, part: str) -> list[int]:
    """Return the indexes of lines at which the lines of `part` begin, ignoring indentation."""
    target = [line.strip() for line in part.strip().splitlines()]
    lines = [line.strip() for line in text.splitlines()]
    return [
        start
        for start in range(len(lines))
        if target and lines[start : start + len(target)] == target
    ]


def _indented_as(similar: str, old: str, new: str) -> str:
    """Return the new lines with the indentation of the lines that they replace."""
    indent = similar[: len(similar) - len(similar.lstrip())]
    first = old.lstrip("\r\n")
    old_indent = first[: len(first) - len(first.lstrip())]
    lines = [
        indent + line.removeprefix(old_indent) if line.strip() else line
        for line in new.strip("\r\n").splitlines(keepends=True)
    ]
    ending = similar[len(similar.rstrip("\r\n")) :]
    return "".join(lines) + ending * bool(lines)


def _diff(name: str, before: FileContent | None, after: FileContent) -> str:
    old_lines = before.data.decode().splitlines() if before is not None else []
    new_lines = after.data.decode().splitlines()
    old_name = f"a/{name}" if before is not None else "/dev/null"
    diff = list(difflib.unified_diff(old_lines, new_lines, old_name, f"b/{name}", lineterm=""))
    if len(diff) > _PREVIEW_LINES:
        left_out = len(diff) - _PREVIEW_LINES
        diff = [*diff[:_PREVIEW_LINES], f"[{left_out:,} more lines of the difference]"]
    return "\n".join(diff)
