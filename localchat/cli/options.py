"""Flags that several commands share.

The parameter name of a flag is the key of its setting. Settings check its value, so that flags, environment
variables and lines of the settings file fail with the same messages.
"""

import math
import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from localchat.config.parameters import PARAMETERS, Parameter
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.config.settings import Given


_Decorated = TypeVar("_Decorated", bound=Callable[..., object])


class FiniteRange(click.FloatRange):
    """A finite number within a range. FloatRange accepts `inf`, and `nan`, which passes every comparison."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a valid number.", param, ctx)
        return number


class UserPath(click.Path):
    """A path from the command line. It expands `~`, which the shell leaves alone in quotes."""

    def convert(
        self,
        value: "str | os.PathLike[str]",
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - click's own signature
        from localchat.config.paths import expand_home

        return super().convert(expand_home(os.fspath(value)), param, ctx)


def utf8_argument(text: str) -> str:
    """Decode an argument as UTF-8, even if the encoding of the locale is another one."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def complete_file(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Make the shell complete names of files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_model(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Complete names of local models, or else paths of files."""
    from click.shell_completion import CompletionItem

    from localchat.cli.context import app_context
    from localchat.config.paths import find_paths
    from localchat.models.index import read_index

    app = app_context(ctx)
    names = [model.name for model in read_index(find_paths(app.environ), app.environ).models]
    items = [CompletionItem(name, help="model") for name in names if name.startswith(incomplete)]
    return items or complete_file(ctx, param, incomplete)


class SharedOption(click.Option):
    """A flag of several verbs. Their help lists all of these flags in one line."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        options = [param for param in ctx.command.params if isinstance(param, SharedOption)]
        if self is not options[0]:
            return None
        names = ", ".join(option.opts[-1] for option in options)
        return "Other flags", f"{names}. `localchat --help all` explains them."


def _setting_option(
    key: str, parameter: Parameter, cls: type[click.Option] = click.Option
) -> Callable[[_Decorated], _Decorated]:
    """Return the option for a setting."""
    names = parameter.names.split()
    if parameter.is_switch:
        return click.option(*names, key, cls=cls, default=None, help=parameter.flag_help)
    return click.option(
        *names,
        key,
        cls=cls,
        multiple=parameter.is_list,
        metavar=parameter.metavar,
        shell_complete=complete_model if parameter.metavar == "MODEL" else None,
        help=parameter.flag_help,
    )


_THINK: Final = "--think"
_THINK_VALUES: Final = {
    "--no-think": ("false", "off", "no", "none", "0"),
    _THINK: ("true", "on", "yes", "1", "low", "medium", "high"),
}
_UNDECIDED = "localchat.cli.options.undecided"
"""Key in the notes of the context for `--think=auto`, which a switch cannot express."""

AFTER_DASHES = "localchat.cli.options.after_dashes"
"""Key in the notes of the context. True if a `--` precedes the prompt."""
ARGUMENTS = "localchat.cli.options.arguments"
"""Key in the notes of the context for the unparsed arguments of a prompt."""
STOP: Final = "stop"
OPTION: Final = "option"


def _check_pairs(
    _context: click.Context, _option: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Reject KEY=VALUE, whose next word would be taken as the value. Raises UsageError."""
    for key, _ in pairs:
        name, equals, value = key.partition("=")
        if equals:
            raise UsageError(f"-o takes two words, not {key!r}", hint=f"write -o {name} {value}")
    return pairs


def engine_options(
    *, with_model: bool, cls: type[click.Option] = click.Option
) -> Callable[[_Decorated], _Decorated]:
    """Add the flags that choose a model, load it and ask it."""

    def decorate(function: _Decorated) -> _Decorated:
        decorators = [
            _setting_option(key, parameter, cls)
            for key, parameter in PARAMETERS.items()
            if parameter.has_option and (with_model or key != "model")
        ]
        decorators += [
            click.option(
                "-o",
                "--option",
                OPTION,
                cls=cls,
                nargs=2,
                multiple=True,
                metavar="KEY VALUE",
                callback=_check_pairs,
                help="Any sampling setting, for example -o repetition_penalty 1.1. Repeatable.",
            ),
            click.option(
                "--stop",
                STOP,
                cls=cls,
                multiple=True,
                metavar="TEXT",
                help="Stop before this text. Repeatable.",
            ),
        ]
        decorators.append(_no_cache_disk(cls))
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _no_cache_disk(cls: type[click.Option]) -> Callable[[_Decorated], _Decorated]:
    about = "Store no KV cache on disk, like --cache-disk 0."
    return click.option("--no-cache-disk", "cache_disk_gb", cls=cls, flag_value="0", help=about)


def load_flags(function: _Decorated) -> _Decorated:
    """Add the flags of a load, for a command without a prompt."""
    decorators = [
        _setting_option(key, parameter, SharedOption)
        for key, parameter in PARAMETERS.items()
        if parameter.loads
    ]
    decorators.append(_no_cache_disk(SharedOption))
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


class ThinkingCommand(click.Command):
    """Accepts `--think=VALUE` besides `--think` and `--no-think`, like Ollama."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        self._check_switches(args[:end])
        flags = [_thinking(ctx, arg) for arg in args[:end]]
        return super().parse_args(ctx, [flag for flag in flags if flag is not None] + args[end:])

    def _check_switches(self, args: list[str]) -> None:
        """Raise UsageError for `--think off`, which would think about the prompt "off"."""
        switches = {
            name: f"{param.opts[-1]} or {param.secondary_opts[-1]}"
            for param in self.params
            if param.secondary_opts
            for name in (*param.opts, *param.secondary_opts)
        }
        for flag, value in pairwise(args):
            if flag in switches and value in ("on", "off", "true", "false"):
                raise UsageError(
                    f"{flag} is a switch, and {value!r} follows it",
                    hint=f"write {switches[flag]}; a prompt that begins with {value!r} goes after --",
                )


def _thinking(ctx: click.Context, arg: str) -> str | None:
    """Turn `--think=VALUE` into a switch. None for `auto`, which is noted in the context.

    A level counts as on, because models cannot reason more or less. Raises UsageError for other values.
    """
    name, equals, value = arg.partition("=")
    if name not in _THINK_VALUES:
        return arg
    ctx.meta[_UNDECIDED] = name == _THINK and value.lower() == "auto"
    if name != _THINK or not equals:
        return arg
    if ctx.meta[_UNDECIDED]:
        return None
    for switch, values in _THINK_VALUES.items():
        if value.lower() in values:
            return switch
    raise UsageError(f"--think is {value!r}; expected true, false or auto")


def given_flags(ctx: click.Context) -> dict[str, "Given"]:
    """Return the settings on the command line. Raises UsageError for an unknown `-o`."""
    from localchat.config.settings import Given

    settings = dict(_options(ctx.params.get(OPTION, ())))
    for key, value in ctx.params.items():
        if (
            key not in PARAMETERS
            or ctx.get_parameter_source(key) is not ParameterSource.COMMANDLINE
        ):
            continue
        settings[key] = Given(_as_setting(key, value), _flag_name(ctx, key))
    if ctx.meta.get(_UNDECIDED):
        settings["think"] = Given("auto", _THINK)
    return settings


def _options(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, "Given"]]:
    from localchat.config.settings import SAMPLING_KEYS, Given

    for key, value in pairs:
        name = key.replace("-", "_")
        if name not in SAMPLING_KEYS:
            raise UsageError(
                f"-o: there is no sampling setting {key!r}", hint=did_you_mean(name, SAMPLING_KEYS)
            )
        yield name, Given(value, f"-o {key}")


def _as_setting(key: str, value: Any) -> object:  # noqa: ANN401 - whatever click parsed
    if key == "think":
        return "on" if value else "off"
    if key == "system":
        return utf8_argument(value)
    if isinstance(value, tuple):
        return [utf8_argument(text) for text in value]
    return value


def _flag_name(ctx: click.Context, key: str) -> str:
    names = next(param.opts for param in ctx.command.params if param.name == key)
    return names[-1]  # the names before it are short, or those of other programs
