"""Choose the model of a command that processes data and names no model.

The built-in guide answers questions about localchat, so it is never the default of a batch or a measurement.
"""

from typing import TYPE_CHECKING, NamedTuple

import click

from localchat.cli.context import AppContext
from localchat.errors import LocalchatError, ModelInvalid, ModelMissing, UsageError
from localchat.models.resolve import GUIDE, LAST_USED, last_model, locate
from localchat.sanitize import sanitize_line

if TYPE_CHECKING:
    from localchat.cli.resolve import Inputs
    from localchat.config.paths import Paths

_SHOWN_CHOICES = 8


class WorkModel(NamedTuple):
    """A model, and the source of the choice."""

    word: str
    """Name, path or server address, in the form that `-m` accepts."""
    why: str
    """Source of the choice, as messages show it."""
    path: str = ""
    """Model file, if a running server has loaded it."""

    @property
    def local_word(self) -> str:
        """Name for a process that loads the model itself."""
        return self.path or self.word


def work_model(ctx: click.Context) -> WorkModel:
    """Return the model for a command without one.

    Raises ModelMissing, ModelInvalid, and UsageError with the choices if only the guide is left.
    """
    from localchat.cli.resolve import Inputs, resolve_setup

    inputs = Inputs.of(ctx)
    resolved = inputs.settings()
    if resolved.settings.remote or resolved.settings.model is not None:
        model = resolve_setup(ctx).model
        if model.remote is not None:
            return WorkModel(model.remote.word, model.why)
        return WorkModel(model.word, model.why)
    return _running_model(inputs.app, inputs.paths) or _last_model(inputs) or _refuse(ctx, inputs)


def _running_model(app: AppContext, paths: "Paths") -> WorkModel | None:
    """Return a model that a running server has loaded."""
    from localchat.cli.attach import running_servers

    for server, loaded in running_servers(paths):
        models = [model for model in loaded if model.name != GUIDE]
        if models:
            why = "the running server has it loaded"
            return WorkModel(f"{server.url}#{models[0].name}", why, models[0].path)
    return None


def _last_model(inputs: "Inputs") -> WorkModel | None:
    """Return the model that answered last, unless that was the guide."""
    name = last_model(inputs.paths)
    if name is None or name == GUIDE:
        return None
    try:
        return WorkModel(locate(name, inputs.paths, LAST_USED, inputs.app.environ).word, LAST_USED)
    except (ModelMissing, ModelInvalid, UsageError):
        return None


def _refuse(ctx: click.Context, inputs: "Inputs") -> WorkModel:
    from localchat.models.index import read_index

    names: list[str] = []
    try:
        models = read_index(inputs.paths, inputs.app.environ).models
        names = [sanitize_line(model.name) for model in models if model.name != GUIDE]
    except LocalchatError:
        pass  # the message lists no choices then
    if names:
        choices = names[:_SHOWN_CHOICES]
        if len(names) > _SHOWN_CHOICES:
            choices.append("…")
        hint = f"name one of yours: {', '.join(choices)}"
    else:
        hint = (
            "the only model here is the built-in guide, which answers questions about localchat\n"
        )
        hint += "localchat run lists models to download"
    raise UsageError(f"{ctx.command_path} needs a model", hint=hint)
