"""`--schema`, `--grammar`, `--regex`: the form that an answer must have."""

from pathlib import Path
from typing import Final

import click

from localchat.cli.answer import Answer
from localchat.engine.request import Grammar
from localchat.errors import FileMissing, LocalchatError, UsageError

_FLAGS: Final = ("schema", "grammar", "regex")
_MOST_BYTES: Final = 1 << 20


def wanted_form(ctx: click.Context) -> Grammar | None:
    """What the flags ask for. Raises UsageError, FileMissing; what is wrong with a schema, the engine says."""
    given = {name: ctx.params[name] for name in _FLAGS if ctx.params.get(name) is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join('--' + name for name in given)}: only one of them")
    match given:
        case {"schema": text}:
            inline = text.lstrip().startswith("{") or text in ("true", "false")
            return Grammar("json_schema", text if inline else _read("--schema", text))
        case {"grammar": name}:
            return Grammar("lark", _read("--grammar", name))
        case {"regex": pattern}:
            return Grammar("regex", pattern)
    return None


def refuse_unfinished(answer: Answer, choices: int) -> None:
    """An answer that was cut off has not the form that was asked. Raises LocalchatError."""
    cut = any(answer.reasons.get(choice) == "length" for choice in range(choices))
    if cut:
        raise LocalchatError(
            "the answer was cut off before it had the form that was asked",
            hint="--max-tokens allows more; bounds in the schema (maxLength, maxItems) make answers end",
        )


def _read(flag: str, name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as problem:
        raise FileMissing(f"{flag}: there is no file {name}") from problem
    except OSError as problem:
        raise UsageError(f"{flag}: {name} cannot be read: {problem.strerror}") from problem
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{flag}: {name} holds more than {_MOST_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UsageError(f"{flag}: {name} is not UTF-8 (byte {problem.start:,})") from problem
