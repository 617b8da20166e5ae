"""From flags, environment and settings file to what a command works with: settings, a model, an engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.config.paths import Paths, find_paths
from localchat.config.remotes import PREFIX, Remote, find_remote
from localchat.config.settings import (
    SAMPLING_KEYS,
    Given,
    Resolved,
    Settings,
    from_environment,
    resolve,
)
from localchat.config.settings_file import read_settings
from localchat.engine.request import GenerateRequest, Grammar, Prompt, Sampling
from localchat.errors import DoesNotFit, EngineDied, LocalchatError, ModelInvalid, UsageError
from localchat.models.resolve import (
    GUIDE,
    LAST_USED,
    ResolvedModel,
    locate,
    locate_default,
    remember_model,
    remote_model,
)

if TYPE_CHECKING:
    from localchat.engine.events import Done
    from localchat.engine.interface import Engine
    from localchat.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that is settled before an engine starts."""

    door: AppContext
    paths: Paths
    settings: Settings
    origins: Mapping[str, str]
    model: ResolvedModel
    terminal: Terminal
    settings_for: Callable[[Iterable[str]], Settings] = lambda names: Settings()
    """The settings in force for a model that goes by these names."""


class Inputs:
    """What flags, environment and settings file say, before a model is known."""

    def __init__(
        self, door: AppContext, given: Mapping[str, Given], model_word: str | None = None
    ) -> None:
        """`given`: by flags. `model_word`: a model that the command names apart from `-m`.
        Raises UsageError."""
        self.door = door
        self.paths = find_paths(door.environ)
        self.flags = dict(given)
        if model_word is not None:
            self.flags["model"] = Given(model_word, "the model named in the command")
        self._file = read_settings(self.paths.settings_file)
        self._environment = from_environment(door.environ)

    @property
    def remotes(self) -> Mapping[str, Remote]:
        """Engines on other machines that the settings file names."""
        return self._file.remotes

    @classmethod
    def of(cls, ctx: click.Context, model_word: str | None = None) -> "Inputs":
        """The same for the flags of a command."""
        door = ctx.find_object(AppContext)
        assert door is not None
        return cls(door, given_flags(ctx), model_word)

    def settings(self, names: Iterable[str] = ()) -> Resolved:
        """The settings in force for a model of these names. Raises UsageError."""
        return resolve(self._file.layer(names), self._environment, self.flags)


def prepare(ctx: click.Context, model_word: str | None = None) -> Setup:
    """Settle settings and model. `model_word`: a model that the command names apart from `-m`. Raises
    UsageError, ModelMissing."""
    door = ctx.find_object(AppContext)
    assert door is not None
    return settle(door, given_flags(ctx), model_word)


def settle(
    door: AppContext,
    given: Mapping[str, Given],
    model_word: str | None = None,
    terminal: Terminal | None = None,
) -> Setup:
    """The same from flags that are known already. `terminal`: where a screen holds the streams, the one from
    before. Raises UsageError, ModelMissing."""
    said = Inputs(door, given, model_word)
    paths = said.paths
    chosen = said.settings()
    word = chosen.settings.model
    if (remote := _remote(said, chosen)) is not None:
        model = remote_model(
            _allowed(remote, chosen.settings),
            chosen.origins["remote" if chosen.settings.remote else "model"],
        )
    elif "model" in said.flags and word is not None:
        model = locate(word, paths, chosen.origins["model"], door.environ)
    else:
        model = locate_default(word, chosen.origins["model"], paths, door.environ)
    names = dict.fromkeys((model.name, model.word, *([word] if word else [])))
    settings, origins = said.settings(names)

    def settings_for(names: Iterable[str]) -> Settings:
        return said.settings(names).settings

    if terminal is None:
        terminal = Terminal(door.environ, quiet=settings.quiet, color=settings.color)
    return Setup(door, paths, settings, origins, model, terminal, settings_for)


def _remote(said: Inputs, chosen: Resolved) -> Remote | None:
    """The engine elsewhere that is meant. A model that is named beside it is the server's; one named by flag
    alone is of this machine, whatever the settings file says of a remote."""
    word, place = chosen.settings.model, chosen.settings.remote
    if word is not None and word.startswith(PREFIX):
        return find_remote(word, said.remotes)
    if place is None or ("model" in said.flags and "remote" not in said.flags):
        return None
    named = f"#{word}" if word and "model" in said.flags and "#" not in place else ""
    return find_remote(place + named, said.remotes)


def _allowed(remote: Remote, settings: Settings) -> Remote:
    if settings.offline and not remote.here:
        raise UsageError(
            f"the remote {remote.name} is on another machine, and offline is set",
            hint="leave --offline out",
        )
    return remote


@contextmanager
def opened_engine(setup: Setup) -> "Iterator[Engine]":
    """The engine of the settled model, on a running server or of our own, closed at the end whatever happens.
    Raises LocalchatError."""
    say = setup.terminal.say
    try:
        engine = setup.door.attach(setup, "command line", say) or _own_engine(setup)
        try:
            yield engine
        finally:
            engine.close()
    except (ModelInvalid, DoesNotFit, EngineDied) as problem:
        if setup.model.why == LAST_USED and problem.details.get("phase") != "serve":
            problem.hint = "\n".join(filter(None, (problem.hint, _another(setup.model.name))))
        raise


def _another(name: str) -> str:
    """The way out for who named no model: it ran once, and stands in the way of every start now."""
    return (
        f"nobody named {name}: it answered last. -m MODEL asks another, which is the default once it has "
        f"answered: localchat -m {GUIDE} …, or one of localchat list"
    )


def _own_engine(setup: Setup) -> "Engine":
    return setup.door.open_engine(engine_options(setup), setup.terminal.say)


def engine_options(setup: Setup) -> "EngineOptions":
    """How the engine of the settled model is opened."""
    from localchat.pool.resolver import engine_options as options_of

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


def remember(setup: Setup, engine: "Engine | None" = None, done: "Done | None" = None) -> None:
    """The model answered: it is the next run's, where none is named. `engine`, `done`: of an answer that was
    given alone, whose pace is remembered too."""
    if setup.model.remote is not None:
        return  # it is named each time: nothing goes to another machine by itself
    try:
        remember_model(setup.model, setup.paths)
        if engine is not None and done is not None:
            from localchat.models.speed_recorder import record_speed  # looks at the machine

            record_speed(engine.info(), done, setup.paths.state_dir)
    except (OSError, LocalchatError) as problem:
        why = (isinstance(problem, OSError) and problem.strerror) or problem
        setup.terminal.say(f"the model and the speed of this run cannot be remembered: {why}")
