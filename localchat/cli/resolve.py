"""Resolves flags, environment and settings file into settings, a model and an engine."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import structs

from localchat.cli.context import AppContext, Notify
from localchat.cli.options import given_flags
from localchat.cli.preset_options import preset_of
from localchat.cli.streams import Terminal
from localchat.config.paths import Paths, file_state, find_paths
from localchat.config.remotes import PREFIX, Remote, find_remote
from localchat.config.routes import PREFIX as ROUTE
from localchat.config.routes import Route, find_route
from localchat.config.settings import (
    SAMPLING_KEYS,
    Given,
    Resolved,
    Settings,
    from_environment,
    resolve,
    variable,
)
from localchat.config.settings_file import read_settings
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Grammar, Prompt, Sampling
from localchat.errors import DoesNotFit, EngineDied, LocalchatError, ModelInvalid, UsageError
from localchat.models.resolve import (
    GUIDE,
    IN_COMMAND,
    LAST_USED,
    ResolvedModel,
    locate,
    locate_default,
    planned_load,
    remember_model,
    remote_model,
    route_model,
)

if TYPE_CHECKING:
    from localchat.config.presets import Preset
    from localchat.engine.attached.protocol import AttachSpec
    from localchat.engine.events import Done
    from localchat.engine.interface import Engine, EngineInfo

CHAT_SLOTS = 2
"""Requests that a chat's engine computes at once, at least: an answer, and whatever the user starts next."""


class Setup(msgspec.Struct, frozen=True):
    """Settings and model of a command, before an engine is opened."""

    app: AppContext
    paths: Paths
    settings: Settings
    origins: Mapping[str, str]
    """Where each setting comes from, by key."""
    model: ResolvedModel
    terminal: Terminal
    settings_for: Callable[[Iterable[str]], Settings] = lambda names: Settings()
    """The settings for a model that goes by these names."""


class Inputs:
    """Flags, environment and settings file, before a model is known."""

    def __init__(
        self,
        app: AppContext,
        given: Mapping[str, Given],
        model_word: str | None = None,
        preset: "Preset | None" = None,
    ) -> None:
        """`given`: by flags, which go over those of `preset`. `model_word`: the model that the command names as
        an argument. Raises UsageError."""
        self.app = app
        self.paths = find_paths(app.environ)
        self.flags = {**(preset.layer() if preset is not None else {}), **given}
        if model_word is not None:
            self.flags["model"] = Given(model_word, IN_COMMAND)
        self._state = file_state(self.paths.settings_file)
        self._file = read_settings(self.paths.settings_file)
        self._environment = from_environment(app.environ)

    @property
    def remotes(self) -> Mapping[str, Remote]:
        """Remote engines of the settings file, by name."""
        return self._file.remotes

    @property
    def routes(self) -> Mapping[str, Route]:
        """Routes of the settings file, by name."""
        return self._file.routes

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences about the settings file, for the user."""
        return self._file.notices

    @classmethod
    def of(cls, ctx: click.Context, model_word: str | None = None) -> "Inputs":
        """Inputs with the flags of a command."""
        app = ctx.find_object(AppContext)
        assert app is not None
        return cls(app, given_flags(ctx), model_word, preset_of(ctx))

    def settings(self, names: Iterable[str] = ()) -> Resolved:
        """The settings for a model that goes by these names. Raises UsageError."""
        found = resolve(self._file.layer(names), self._environment, self.flags)
        if library := found.settings.llamacpp_library:
            # Backends read the variable, here and in the processes that are started from here.
            os.environ[variable("llamacpp_library")] = library
        return found

    def reread(self, notify: Notify) -> None:
        """Read the settings file again if it has changed. One with an error is reported once, and the
        settings stay as they were."""
        state = file_state(self.paths.settings_file)
        if state == self._state:
            return
        self._state = state
        try:
            self._file = read_settings(self.paths.settings_file)
        except UsageError as problem:
            notify(f"the settings stay as they were: {problem.message}")


def follow_library_setting(app: AppContext) -> None:
    """Let backends load the library that the settings name, for a command that resolves no settings.

    An error in the settings is left to the command that needs them."""
    with suppress(LocalchatError):
        Inputs(app, {}).settings()


def resolve_setup(ctx: click.Context, model_word: str | None = None) -> Setup:
    """Resolve the flags of a command. Raises UsageError, ModelMissing.

    `model_word`: the model that the command names as an argument."""
    return resolve_inputs(Inputs.of(ctx, model_word))


def resolve_inputs(inputs: Inputs, terminal: Terminal | None = None) -> Setup:
    """Resolve inputs to a model and its settings. Raises UsageError, ModelMissing.

    `terminal`: the one in use already, if a screen owns the streams."""
    paths = inputs.paths
    environ = inputs.app.environ
    chosen = inputs.settings()
    word = chosen.settings.model
    if (remote := _remote(inputs, chosen)) is not None:
        model = remote_model(
            _allowed(remote, chosen.settings),
            chosen.origins["remote" if chosen.settings.remote else "model"],
        )
    elif word is not None and word.startswith(ROUTE):
        route = find_route(word, inputs.routes)
        model = route_model(route, paths, chosen.origins["model"], environ)
    elif "model" in inputs.flags and word is not None:
        model = locate(word, paths, chosen.origins["model"], environ)
    else:
        model = locate_default(word, chosen.origins["model"], paths, environ)
    names = dict.fromkeys((model.name, model.word, *([word] if word else [])))
    settings, origins = inputs.settings(names)

    told = terminal or Terminal(
        environ, quiet=settings.quiet, color=settings.color, stats=settings.stats
    )
    if terminal is None:
        for notice in inputs.notices:
            told.notify(notice)
    if model.notice:
        told.notify(model.notice)

    def settings_for(names: Iterable[str]) -> Settings:
        inputs.reread(told.notify)
        return inputs.settings(names).settings

    return Setup(inputs.app, paths, settings, origins, model, told, settings_for)


def _remote(inputs: Inputs, chosen: Resolved) -> Remote | None:
    """The remote engine of these settings. A model that is named with it is the server's; one that is named
    by flag alone is on this machine, even if the settings file names a remote."""
    word = chosen.settings.model
    place = chosen.settings.remote
    if word is not None and word.startswith(PREFIX):
        return find_remote(word, inputs.remotes)
    if place is None or ("model" in inputs.flags and "remote" not in inputs.flags):
        return None
    named = f"#{word}" if word and "model" in inputs.flags and "#" not in place else ""
    return find_remote(place + named, inputs.remotes)


def _allowed(remote: Remote, settings: Settings) -> Remote:
    if settings.offline and not remote.here:
        raise UsageError(
            f"the remote {remote.name} is on another machine, and offline is set",
            hint="leave --offline out",
        )
    return remote


# ---------------------------------------------------------------------------- the engine


@contextmanager
def opened_engine(setup: Setup, *, one_answer: bool = False) -> "Iterator[Engine]":
    """Open the engine of the model and close it at the end. one_answer: see LoadOptions. Raises
    LocalchatError."""
    try:
        engine = open_engine(setup, "command line", setup.terminal.note, one_answer=one_answer)
        try:
            yield engine
        finally:
            engine.close()
    except (ModelInvalid, DoesNotFit, EngineDied) as problem:
        if isinstance(problem, DoesNotFit) and "needed_bytes" in problem.details:
            from localchat.models.recommended_models import with_models_that_fit

            problem.hint = with_models_that_fit(problem.hint, setup.paths)
        if setup.model.why == LAST_USED and problem.details.get("phase") != "serve":
            problem.hint = "\n".join(filter(None, (problem.hint, _another(setup.model.name))))
        raise


def open_engine(setup: Setup, user: str, notify: Notify, *, one_answer: bool = False) -> "Engine":
    """Attach to a running server, or load the model here. Raises LocalchatError. `user`: shown by `ps`;
    one_answer: see LoadOptions."""
    # A library that a flag names is loaded here: a server has its own.
    own = setup.origins.get("llamacpp_library", "").startswith("--")
    if setup.settings.attach and not setup.model.is_composed and not own:
        attached = setup.app.attach(setup.paths, _attach_spec(setup), user, notify)
        if attached is not None:
            return attached
    options = engine_options(setup)
    load = structs.replace(options.load, one_answer=one_answer)
    return setup.app.open_engine(structs.replace(options, load=load), notify)


def model_label(setup: Setup, engine: "Engine") -> str:
    """Return the name of the model as messages show it: of a remote, what its server calls it."""
    remote = setup.model.remote
    if remote is None or remote.model:
        return setup.model.name
    with suppress(LocalchatError):  # the first question reports what is wrong with the server
        return f"{engine.info().model} on {remote.name}"
    return setup.model.name


def _attach_spec(setup: Setup) -> "AttachSpec":
    from localchat.engine.attached.protocol import AttachSpec

    return AttachSpec(
        model=os.fsencode(setup.model.path),
        name=setup.model.name,
        word=setup.model.word,
        backend=setup.settings.backend,
        load=planned_load(setup.settings, setup.paths),
    )


def _another(name: str) -> str:
    """Hint for a default model that failed to load: it would fail at every start."""
    return (
        f"{name} is the default because it answered last; -m MODEL asks another, which is then the default: "
        f"localchat -m {GUIDE} …, or one of localchat list"
    )


def engine_options(setup: Setup) -> EngineOptions:
    """The options that the engine of the model is opened with."""
    from localchat.pool.resolver import engine_options as options_of  # not for an attached engine

    slots = max(CHAT_SLOTS, setup.settings.n)
    of = setup.settings_for
    return options_of(setup.model, setup.settings, setup.paths, max_slots=slots, settings_for=of)


def request_for(
    settings: Settings, prompt: Prompt, grammar: Grammar | None = None, logprobs: int | None = None
) -> GenerateRequest:
    """One request with these settings."""
    return GenerateRequest(
        prompt=prompt,
        sampling=Sampling(**{key: getattr(settings, key) for key in SAMPLING_KEYS}),
        n=settings.n,
        max_tokens=settings.max_tokens,
        stop=settings.stop,
        grammar=grammar,
        logprobs=logprobs,
        speculation=settings.speculation,
        loop_guard=settings.loop_guard,
        default_limit=True,
    )


def owned(request: GenerateRequest, settings: Settings, conversation: str) -> GenerateRequest:
    """The request with its KV kept on the disk for a conversation, where conversations are kept."""
    return structs.replace(request, owner=conversation if settings.history else "")


def remember(
    setup: Setup,
    info: "Callable[[], EngineInfo | None] | None" = None,
    done: "Done | None" = None,
) -> None:
    """Remember a model that answered, as `record_use` does. Failures become a notice."""
    try:
        record_use(setup.model, setup.paths, info, done)
    except (OSError, LocalchatError) as problem:
        why = (isinstance(problem, OSError) and problem.strerror) or problem
        setup.terminal.notify(f"cannot save the model and the speed of this run: {why}")


def record_use(
    model: ResolvedModel,
    paths: Paths,
    info: "Callable[[], EngineInfo | None] | None",
    done: "Done | None",
) -> None:
    """Make the model the default of the next run, and record its speed. Blocks.

    `info`, `done`: of an answer that the engine generated alone. Raises OSError, LocalchatError."""
    if model.is_composed:
        return  # named in each command: nothing goes to another machine by default
    remember_model(model, paths)
    if info is not None and done is not None and (about := info()) is not None:
        from localchat.models.speed_recorder import record_speed  # probes the hardware

        record_speed(about, done, paths.state_dir)
