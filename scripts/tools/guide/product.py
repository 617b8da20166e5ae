"""The guide as users meet it: localchat's own engine answers, and its parser checks commands."""

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import click  # noqa: E402 - from here on the checkout's own localchat counts

from localchat.cli.context import AppContext  # noqa: E402
from localchat.cli.main import root  # noqa: E402
from localchat.cli.verb_words import translate  # noqa: E402
from localchat.engine.events import Finished, Text  # noqa: E402
from localchat.engine.options import EngineOptions  # noqa: E402
from localchat.engine.request import (  # noqa: E402
    GenerateRequest,
    Message,
    Messages,
    Sampling,
)
from localchat.errors import LocalchatError  # noqa: E402
from localchat.verbs import ALIASES, VERBS  # noqa: E402

_STANDS_FOR: Final = {
    "N": "8",
    "TYPE": "q8_0",
    "SHELL": "bash",
    "KEY": "temperature",
    "VALUE": "0.5",
    "LAYERS": "12",
    "SECONDS": "60",
}
"""Values for the placeholders of an example, where the parser checks them."""


class Product:
    """One GGUF file in localchat's engine; greedy. Use as a context manager."""

    def __init__(self, model: Path) -> None:
        self._engine = AppContext().open_engine(
            EngineOptions(model, name="guide"), lambda text: print(text, file=sys.stderr)
        )

    def answer(self, messages: list[tuple[str, str]], max_tokens: int = 400) -> tuple[str, bool]:
        """The answer to a conversation of (role, text), and whether it ended by itself."""
        request = GenerateRequest(
            Messages(tuple(Message(role, text) for role, text in messages)),
            Sampling(temperature=0),
            max_tokens=max_tokens,
        )
        text, ended = "", False
        for event in self._engine.generate(request):
            if isinstance(event, Text):
                text += event.text
            elif isinstance(event, Finished):
                ended = event.reason == "stop"
        return text, ended

    def __enter__(self) -> "Product":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.close()


def refusal(command: str) -> str:
    """Why the program's own parser refuses `localchat ...`; empty if it accepts it. Nothing is run.

    Everything after a pipe or a redirection belongs to the shell; `a|b` in an example means either.
    """
    command = re.split(r"\s(?:[|>&<]|&&|2>)(?:\s|$)", command)[0]
    try:
        words = shlex.split(command.rstrip(": "))[1:]
    except ValueError as problem:
        return str(problem)
    translated = translate(words)
    first = re.match(r"localchat ([a-z]+)(?= |$)", command)
    if translated != words:
        words = translated
    elif first and first[1] not in (*VERBS, *ALIASES):
        return f"{first[1]!r} is not a verb, and a prompt would be in quotes"
    words = [_STANDS_FOR.get(word, re.sub(r"(?<=\w)\|.*", "", word)) for word in words]
    try:
        with (
            redirect_stdout(io.StringIO()),
            root.make_context("localchat", words, obj=AppContext()) as context,
        ):
            name, verb, rest = root.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            return _refused_by(verb, name or "localchat", rest, context)
    except (click.exceptions.Exit, click.MissingParameter):
        return ""  # --help, or a verb without its arguments
    except (click.ClickException, LocalchatError) as problem:
        return str(problem) or type(problem).__name__


def _refused_by(
    command: click.Command | None, name: str, words: list[str], parent: click.Context
) -> str:
    if command is None:
        return f"there is no verb {name}"
    with command.make_context(name, words, parent=parent) as context:
        if isinstance(command, click.Group) and context._protected_args:
            inner, verb, rest = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            return _refused_by(verb, inner or "", rest, context)
    return ""
