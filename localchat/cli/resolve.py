"""Resolve flags, environment and settings file to settings, a model and an engine."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import structs

from localchat.cli.context import AppContext, Notify, app_context
from localchat.cli.options import given_flags
from localchat.cli.streams import Terminal
from localchat.config.parameters import PARAMETERS
from localchat.config.paths import Paths, file_state, find_paths
from localchat.config.remotes import PREFIX, Remote, find_remote
from localchat.config.settings import (
    SAMPLING_KEYS,
    Given,
    Resolved,
    Settings,
    from_environment,
    resolve,
    unread_variables,
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
)

if TYPE_CHECKING:
    from localchat.config.mcp_servers import McpServer
    from localchat.engine.attached.protocol import AttachSpec
    from localchat.engine.events import Done
    from localchat.engine.interface import Engine, EngineInfo
    from localchat.models.assess import Subject

_NOTICES = "localchat.notices"
"""Name in click's context of the inputs whose notices were printed."""
_CHAT_SLOTS = 2
"""Minimum of parallel requests in a chat: an answer, and whatever the user starts meanwhile."""


class Setup(msgspec.Struct, frozen=True):
    """Settings and model of a command, before an engine is opened."""

    app: AppContext
    paths: Paths
    settings: Settings
    origins: Mapping[str, str]
    """Source of each setting, by key."""
    model: ResolvedModel
    terminal: Terminal
    settings_for: Callable[[Iterable[str]], Settings] = lambda names: Settings()
    """Returns the settings for a model with these names."""
    flags: Mapping[str, Given] = {}
    """Settings of the command line, which apply to other models too."""


class Inputs:
    """Flags, environment and settings file, before a model is known."""

    def __init__(
        self,
        app: AppContext,
        flags: Mapping[str, Given],
        model_word: str | None = None,
    ) -> None:
        """`flags`: settings of flags. `model_word`: model argument of the command. Raises UsageError."""
        self.app = app
        self.paths = find_paths(app.environ)
        self.flags = dict(flags)
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
    def mcp_servers(self) -> "Mapping[str, McpServer]":
        """MCP servers of the settings file, by name."""
        return self._file.mcp_servers

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences about the settings file and the environment, for the user."""
        unread = unread_variables(self.app.environ, self._file.variables)
        return (*self._file.notices, *unread)

    @classmethod
    def of(cls, ctx: click.Context, model_word: str | None = None) -> "Inputs":
        """Return the inputs of a command with its flags, and print notices once."""
        inputs = cls(app_context(ctx), given_flags(ctx), model_word)
        # Commands may resolve their flags several times.
        if inputs.notices and ctx.meta.setdefault(_NOTICES, inputs) is inputs:
            settings = inputs.settings().settings
            output = Terminal(inputs.app.environ, quiet=settings.quiet, color=settings.color)
            for notice in inputs.notices:
                output.notify(notice)
        return inputs

    def settings(self, names: Iterable[str] = ()) -> Resolved:
        """Return the settings for a model with these names. Raises UsageError."""
        resolved = resolve(self._file.layer(names), self._environment, self.flags)
        if library := resolved.settings.llamacpp_library:
            # Backends read the variable in this process and in its children.
            os.environ[variable("llamacpp_library")] = library
        if resolved.settings.screen_reader:
            # Line editing, progress bars and wrapped text move no cursor on such a terminal.
            os.environ["TERM"] = "dumb"
        return resolved

    def reread(self, notify: Notify) -> None:
        """Read the settings file again if it has changed.

        If it has an error, report that once and keep the settings.
        """
        state = file_state(self.paths.settings_file)
        if state == self._state:
            return
        self._state = state
        try:
            self._file = read_settings(self.paths.settings_file)
        except UsageError as problem:
            notify(f"the settings stay as they were: {problem.message}")


def follow_library_setting(app: AppContext) -> None:
    """Apply the library setting for a command that resolves no other settings.

    Errors in the settings are ignored. Commands that need the settings report them.
    """
    with suppress(LocalchatError):
        Inputs(app, {}).settings()


def resolve_setup(ctx: click.Context, model_word: str | None = None) -> Setup:
    """Resolve the flags of a command. `model_word` is its model argument. Raises UsageError, ModelMissing."""
    return resolve_inputs(Inputs.of(ctx, model_word))


def resolve_inputs(inputs: Inputs, terminal: Terminal | None = None) -> Setup:
    """Resolve inputs to a model and its settings. Raises UsageError, ModelMissing.

    `terminal` is the terminal in use, if a screen owns the streams.
    """
    paths = inputs.paths
    environ = inputs.app.environ
    chosen = inputs.settings()
    name = chosen.settings.model
    if (remote := _remote(inputs, chosen)) is not None:
        source_key = "remote" if chosen.settings.remote else "model"
        model = remote_model(allowed_remote(remote, chosen.settings), chosen.origins[source_key])
    elif "model" in inputs.flags and name is not None:
        model = locate(name, paths, chosen.origins["model"], environ)
    else:
        model = locate_default(name, chosen.origins["model"], paths, environ)
    # The settings file has settings for models, so resolve again now that the names of the model are known.
    names = dict.fromkeys(model.names)
    if name:
        names[name] = None
    settings, origins = inputs.settings(names)
    if model.remote is not None and settings.lora:
        raise UsageError(
            f"{origins['lora']}: LoRA adapters apply to models on this machine; {model.name} answers from a "
            "server",
            hint="start that server with the adapter: localchat serve MODEL --lora PATH",
        )
    output = terminal or Terminal(
        environ, quiet=settings.quiet, color=settings.color, stats=settings.stats
    )
    if model.notice:
        output.notify(model.notice)
    if model.remote is not None and terminal is None:
        for flag in _load_flags(inputs.flags):
            output.notify(f"{flag} has no effect: {model.name} is loaded by its own server")

    def settings_for(names: Iterable[str]) -> Settings:
        inputs.reread(output.notify)
        return inputs.settings(names).settings

    return Setup(inputs.app, paths, settings, origins, model, output, settings_for, inputs.flags)


def _load_flags(flags: Mapping[str, Given]) -> list[str]:
    """Return the flags of a load among the given ones."""
    return [
        setting.origin
        for key, setting in flags.items()
        if key in PARAMETERS and PARAMETERS[key].loads and key != "speculation"
    ]


def _remote(inputs: Inputs, chosen: Resolved) -> Remote | None:
    """Return the remote engine of these settings, or None.

    A model that is named together with a remote is the server's. A model that is named by its flag alone is on
    this machine, even if the settings file names a remote.
    """
    name = chosen.settings.model
    remote = chosen.settings.remote
    if name is not None and name.startswith(PREFIX):
        return find_remote(name, inputs.remotes)
    if remote is None or ("model" in inputs.flags and "remote" not in inputs.flags):
        return None
    if name and "model" in inputs.flags and "#" not in remote:
        remote += f"#{name}"
    return find_remote(remote, inputs.remotes)


def allowed_remote(remote: Remote, settings: Settings) -> Remote:
    """Return the remote. Raises UsageError for one on another machine while offline is set."""
    if settings.offline and not remote.here:
        raise UsageError(
            f"the remote {remote.name} is on another machine, and offline is set",
            hint="leave --offline out",
        )
    return remote


@contextmanager
def opened_engine(setup: Setup, *, single_request_tokens: int = 0) -> "Iterator[Engine]":
    """Open the engine of the model and close it at the end. Raises LocalchatError.

    LoadOptions describes `single_request_tokens`.
    """
    try:
        engine = open_engine(
            setup,
            "command line",
            setup.terminal.note,
            single_request_tokens=single_request_tokens,
        )
        try:
            yield engine
        finally:
            engine.close()
    except (ModelInvalid, DoesNotFit, EngineDied) as problem:
        if setup.model.why == LAST_USED and problem.details.get("phase") != "serve":
            problem.hint = f"{problem.hint}\n{_other_model_hint(setup.model.name)}".lstrip("\n")
        raise


def open_engine(
    setup: Setup, user: str, notify: Notify, *, single_request_tokens: int = 0
) -> "Engine":
    """Attach to a running server, or load the model in a process of this command. Raises LocalchatError.

    `ps` shows `user`. LoadOptions describes `single_request_tokens`.
    """
    # A server has loaded its own library, so a library that a flag names needs a new process.
    has_library_flag = setup.origins.get("llamacpp_library", "").startswith("--")
    if setup.settings.attach and setup.model.remote is None and not has_library_flag:
        attached = setup.app.attach(setup.paths, _attach_spec(setup), user, notify)
        if attached is not None:
            return attached
    options = engine_options(setup)
    load = structs.replace(options.load, single_request_tokens=single_request_tokens)
    return setup.app.open_engine(structs.replace(options, load=load), notify)


def model_label(setup: Setup, engine: "Engine") -> str:
    """Return the name of the model as messages show it. A remote model has the name of its server."""
    remote = setup.model.remote
    if remote is None or remote.model:
        return setup.model.name
    with suppress(LocalchatError):  # the first question reports errors of the server
        return f"{engine.info().model} on {remote.name}"
    return setup.model.name


def _attach_spec(setup: Setup) -> "AttachSpec":
    from localchat.engine.attached.protocol import AttachSpec

    return AttachSpec(
        model=os.fsencode(setup.model.path),
        name=setup.model.name,
        typed_name=setup.model.word,
        backend=setup.settings.backend,
        load=planned_load(setup.settings, setup.paths),
    )


def _other_model_hint(name: str) -> str:
    """Return the hint for a default model that would fail at every start."""
    return (
        f"{name} is the default because it answered last; -m MODEL asks another, which then becomes the "
        f"default: localchat -m {GUIDE} …, or a model of localchat list"
    )


def engine_options(setup: Setup) -> EngineOptions:
    """Return the options to open the engine of the model with."""
    from localchat.pool import resolver  # an attached engine does not need it

    return resolver.engine_options(
        setup.model,
        setup.settings,
        setup.paths,
        max_slots=chat_slots(setup.settings),
    )


def chat_slots(settings: Settings) -> int:
    """Return how many requests the engine of a chat computes at once."""
    return max(_CHAT_SLOTS, settings.n)


def subject_of(model: ResolvedModel, settings: Settings) -> "Subject":
    """Read the headers of a local model, so that its load can be planned. Raises LocalchatError."""
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.assess import Subject

    summary = read_summary(model.path, dummy_weights=settings.dummy_weights)
    return Subject(model.name, summary, model.path, settings.backend)


def request_for(
    settings: Settings, prompt: Prompt, grammar: Grammar | None = None
) -> GenerateRequest:
    """Return a request with these settings."""
    return GenerateRequest(
        prompt=prompt,
        sampling=Sampling(**{key: getattr(settings, key) for key in SAMPLING_KEYS}),
        n=settings.n,
        max_tokens=settings.max_tokens,
        stop=settings.stop,
        grammar=grammar,
        speculation=settings.speculation,
        loop_guard=settings.loop_guard,
        default_limit=True,
    )


def owned(request: GenerateRequest, settings: Settings, conversation: str) -> GenerateRequest:
    """Return the request with its KV stored for a conversation, if the history is on."""
    return structs.replace(request, owner=conversation if settings.history else "")


def remember(
    setup: Setup,
    info: "Callable[[], EngineInfo | None] | None" = None,
    done: "Done | None" = None,
) -> None:
    """Call `record_use` for a model that answered. Show failures as a notice."""
    try:
        record_use(setup.model, setup.paths, info, done)
    except (OSError, LocalchatError) as problem:
        reason = (isinstance(problem, OSError) and problem.strerror) or problem
        setup.terminal.notify(f"cannot save the model and the speed of this run: {reason}")


def record_use(
    model: ResolvedModel,
    paths: Paths,
    info: "Callable[[], EngineInfo | None] | None",
    done: "Done | None",
) -> None:
    """Make the model the default of the next run, and record its speed. Blocks.

    `info` and `done` describe an answer that the engine generated alone. Raises OSError, LocalchatError.
    """
    if model.remote is not None:
        return  # a remote is never the default, so that prompts leave this machine only on request
    remember_model(model, paths)
    if info is not None and done is not None and (engine_info := info()) is not None:
        from localchat.models.speed_recorder import record_speed  # probes the hardware

        record_speed(engine_info, done, paths.state_dir)
