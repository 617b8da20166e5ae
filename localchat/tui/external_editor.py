"""Edits a text in the editor that $VISUAL or $EDITOR names."""

import asyncio
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from textual.app import App

from localchat.errors import UsageError
from localchat.tui.textual_internals.driver import terminal_released


class EditedText(NamedTuple):
    """A text after its editor has exited."""

    text: str
    command: str
    status: int
    """Exit status of the editor. The text counts only if it is 0."""


async def edit_text(app: App[Any], text: str, environ: Mapping[str, str]) -> EditedText:
    """Open a text in the user's editor and wait for its end. Raises UsageError if it cannot start."""
    command = environ.get("VISUAL") or environ.get("EDITOR") or "vi"
    handle, name = tempfile.mkstemp(suffix=".md", prefix="localchat-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        arguments = [*shlex.split(command), name]
        # An exception inside the block would leave the terminal without a reader.
        with terminal_released(app):
            status = await _run_program(arguments)
        if isinstance(status, OSError):
            raise status
        written = Path(name).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (OSError, ValueError) as problem:
        reason = (isinstance(problem, OSError) and problem.strerror) or problem
        raise UsageError(
            f"cannot start the editor {command}: {reason}", hint="set EDITOR"
        ) from problem
    finally:
        Path(name).unlink(missing_ok=True)
    return EditedText(written, command, status)


async def _run_program(arguments: Sequence[str]) -> int | OSError:
    """Run a program. Return its exit status, or the error that kept it from starting."""
    try:
        process = await asyncio.create_subprocess_exec(*arguments)
    except OSError as problem:
        return problem
    return await process.wait()
