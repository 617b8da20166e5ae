"""Flags of the measuring commands, and the parsers of their values."""

import re
from typing import Final

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.errors import UsageError

_DURATION: Final = re.compile(r"([\d.]+)\s*(ms|s|min|h|)")
_UNITS_MS: Final = {"ms": 1.0, "": 1.0, "s": 1e3, "min": 60e3, "h": 3600e3}
_MAX_RATE: Final = 10_000.0
_MAX_CONVERSATIONS: Final = 200
_PLAIN_ROLES: Final = ("system", "user", "assistant")
_MAX_COUNT: Final = 1_000_000_000

models_argument = click.argument(
    "words", metavar="[MODEL...]", nargs=-1, shell_complete=complete_model
)
vary_option = click.option(
    "--vary",
    multiple=True,
    metavar="KEY=A,B",
    help="Compare values of a setting, for example kv-type=f16,q8_0. Repeatable.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
quiet_option = click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Show no progress. Default: off."
)


def default_model(ctx: click.Context) -> str:
    """Return the model to measure if the command names none. Raises UsageError, ModelMissing."""
    from localchat.cli.work_model import work_model

    return work_model(ctx).local_word


def parse_counts(text: str | None, flag: str, *, maximum: int = _MAX_COUNT) -> tuple[int, ...]:
    """Parse numbers of at least 1, such as `1,4,16` or `2k`. Empty without a text. Raises UsageError."""
    if text is None:
        return ()
    counts: dict[int, None] = {}
    for part in map(str.strip, text.split(",")):
        digits = part.lower().removesuffix("k")
        if not (digits.isascii() and digits.isdecimal()) or int(digits) < 1:
            raise UsageError(
                f"{flag} {text}: {part!r} is not a number of at least 1",
                hint=f"as in {flag} 1,4,16",
            )
        count = int(digits)
        if part.lower().endswith("k"):
            count *= 1024
        if count > maximum:
            raise UsageError(f"{flag} {text}: {part!r} is too large; it is at most {maximum:,}")
        counts[count] = None
    return tuple(counts)


def parse_rates(text: str | None) -> tuple[float, ...]:
    """Parse `0.5,2` as requests per second; empty without a text. Raises UsageError."""
    if text is None:
        return ()
    rates = []
    for part in map(str.strip, text.split(",")):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= _MAX_RATE:
            raise UsageError(
                f"--rate {text}: {part!r} is not a number of requests per second",
                hint="as in --rate 0.5,2",
            )
        rates.append(rate)
    return tuple(dict.fromkeys(rates))


def own_prompts(app: AppContext) -> list[tuple[dict[str, str], ...]]:
    """Return the newest conversations up to their last question. Raises UsageError without any."""
    from localchat.cli.chat.conversation_options import open_history
    from localchat.config.paths import find_paths

    prompts = []
    with open_history(find_paths(app.environ), to_read=True) as history:
        for summary in history.list()[:_MAX_CONVERSATIONS]:
            messages = [
                {"role": node.message.role, "content": node.message.content}
                for node in history.load(summary.id).path()
                if node.message.content and node.message.role in _PLAIN_ROLES
            ]
            while messages and messages[-1]["role"] != "user":
                messages.pop()
            if messages:
                prompts.append(tuple(messages))
    if not prompts:
        raise UsageError("--history: there are no conversations yet", hint="or give --prompts FILE")
    return prompts


def parse_milliseconds(text: str | None, flag: str) -> float | None:
    """Parse `500ms`, `0.5s`, `2min` or `500` as milliseconds. Raises UsageError."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    value = 0.0
    if match is not None:
        try:
            value = float(match[1])
        except ValueError:  # several dots
            value = 0.0
    if match is None or value <= 0:
        raise UsageError(
            f"{flag} is {text!r}, which is not a time", hint=f"as in {flag} 500ms or {flag} 0.5s"
        )
    return value * _UNITS_MS[match[2]]
