"""From flags, environment and settings file to what a command works with: settings, a model, an engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from localchat.cli.door import Door
from localchat.cli.options import given_flags
from localchat.cli.terminal import Terminal
from localchat.engine.request import GenerateRequest, Grammar, Prompt, Sampling
from localchat.library.locate import LocatedModel, locate, locate_default, remember_model
from localchat.paths import Paths, find_paths
from localchat.settings import SAMPLING_KEYS, Given, Settings, from_environment, resolve
from localchat.settings_file import read_settings

if TYPE_CHECKING:
    from localchat.engine.engine import Engine
    from localchat.engine.local import EngineOptions


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that is settled before an engine starts."""

    door: Door
    paths: Paths
    settings: Settings
    origins: Mapping[str, str]
    model: LocatedModel
    terminal: Terminal
    settings_for: Callable[[Iterable[str]], Settings] = lambda names: Settings()
    """The settings in force for a model that goes by these names."""


def prepare(ctx: click.Context, model_word: str | None = None) -> Setup:
    """Settle settings and model. `model_word`: a model that the command names apart from `-m`. Raises
    UsageError, ModelMissing."""
    door = ctx.find_object(Door)
    assert door is not None
    return settle(door, given_flags(ctx), model_word)


def settle(door: Door, given: Mapping[str, Given], model_word: str | None = None) -> Setup:
    """The same from flags that are known already. Raises UsageError, ModelMissing."""
    paths = find_paths(door.environ)
    flags = dict(given)
    file, environment = read_settings(paths.settings_file), from_environment(door.environ)
    if model_word is not None:
        flags["model"] = Given(model_word, "the model named in the command")
    chosen = resolve(file.layer(), environment, flags)
    word = chosen.settings.model
    if "model" in flags and word is not None:
        model = locate(word, paths, chosen.origins["model"], door.environ)
    else:
        model = locate_default(word, chosen.origins["model"], paths, door.environ)
    names = dict.fromkeys((model.name, model.word, *([word] if word else [])))
    settings, origins = resolve(file.layer(names), environment, flags)

    def settings_for(names: Iterable[str]) -> Settings:
        return resolve(file.layer(names), environment, flags).settings

    terminal = Terminal(door.environ, quiet=settings.quiet, color=settings.color)
    return Setup(door, paths, settings, origins, model, terminal, settings_for)


@contextmanager
def opened_engine(setup: Setup) -> "Iterator[Engine]":
    """The engine of the settled model, on a running server or of our own, closed at the end whatever happens.
    Raises LocalchatError."""
    engine = setup.door.attach(setup) or _own_engine(setup)
    try:
        yield engine
    finally:
        engine.close()


def _own_engine(setup: Setup) -> "Engine":
    return setup.door.open_engine(engine_options(setup), setup.terminal.say)


def engine_options(setup: Setup) -> "EngineOptions":
    """How the engine of the settled model is opened."""
    from localchat.pool.finding import engine_options as options_of

    slots = max(2, setup.settings.n)
    return options_of(setup.model, setup.settings, setup.paths, max_slots=slots)


def request_for(settings: Settings, prompt: Prompt, form: Grammar | None = None) -> GenerateRequest:
    """One request under these settings. `form`: what binds the answer."""
    return GenerateRequest(
        prompt=prompt,
        sampling=Sampling(**{key: getattr(settings, key) for key in SAMPLING_KEYS}),
        n=settings.n,
        max_tokens=settings.max_tokens,
        stop=settings.stop,
        grammar=form,
        speculation=settings.speculation,
    )


def remember(setup: Setup) -> None:
    """The model answered: it is the next run's, where none is named."""
    try:
        remember_model(setup.model, setup.paths)
    except OSError as problem:
        setup.terminal.say(f"the model used last cannot be remembered: {problem}")
