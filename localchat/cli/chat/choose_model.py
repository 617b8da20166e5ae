"""Ask on the terminal which model to run, and whether to download a missing one."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from localchat.cli.context import app_context
from localchat.cli.streams import Terminal, tell
from localchat.config.paths import Paths, find_paths
from localchat.errors import ModelMissing, UsageError
from localchat.sanitize import sanitize_line
from localchat.units import size

if TYPE_CHECKING:
    from localchat.cli.resolve import Inputs


def can_ask() -> bool:
    """Return True if the terminal can show a question and read its answer."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def chosen_model(ctx: click.Context) -> str:
    """Return the model that the user picks from a list. Raises UsageError off a terminal."""
    app = app_context(ctx)
    if not can_ask():
        raise UsageError(
            "run needs a model name: localchat run MODEL",
            hint="localchat list shows your models; on a terminal, localchat run recommends others",
        )
    names = _print_choices(find_paths(app.environ), app.environ)
    while True:
        answer = click.prompt("Number or name", default="1", err=True).strip()
        if not answer.isdecimal():
            return str(answer)
        if 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]
        tell(f"choose a number from 1 to {len(names)}")


def _print_choices(paths: Paths, environ: Mapping[str, str]) -> list[str]:
    """Print the models to pick from, the last used one first, and return their names."""
    from localchat.models.index import read_index
    from localchat.models.info.inspect import inspect
    from localchat.models.recommended_models import recommended_models
    from localchat.models.resolve import last_model

    terminal = Terminal(environ)
    last = last_model(paths)
    models = [model for model in read_index(paths, environ).models if not inspect(model).trouble]
    models.sort(key=lambda model: model.name != last)
    names = [model.name for model in models]
    for number, model in enumerate(models, 1):
        details = [size(model.size_bytes)]
        if model.origin:
            details.append(model.origin)
        if model.name == last:
            details.append("used last")
        terminal.print_line(f"{number:3}  {sanitize_line(model.name)}   {', '.join(details)}")
    here = {name.lower() for name in names}
    recommendations = [
        recommendation
        for recommendation in recommended_models(paths)
        if not any(name.startswith(recommendation.entry) for name in here)
    ]
    if recommendations:
        terminal.print_line("     to download, recommended for this machine:")
    for recommendation in recommendations:
        names.append(recommendation.name)
        terminal.print_line(f"{len(names):3}  {recommendation.name}   {recommendation.summary}")
    return names


def fetched_if_wanted(problem: ModelMissing, inputs: "Inputs") -> bool:
    """Offer to download a missing model. Return True if it was downloaded. Raises LocalchatError."""
    from localchat.config.settings import offline_reason

    name = problem.details.get("pull")
    settings = inputs.settings()
    if (
        not isinstance(name, str)
        or settings.settings.quiet
        or offline_reason(settings, inputs.app.environ)
        or not can_ask()
    ):
        return False
    from localchat.cli.models.pull import pull

    terminal = Terminal(inputs.app.environ, color=settings.settings.color)
    terminal.notify(problem.message)
    return pull(name, inputs, terminal, ask="always")
