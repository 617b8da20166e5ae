"""Flags that several commands share.

The parameter name of a flag is the key of its setting. Settings check its value, so that flags, environment
variables and lines of the settings file fail with the same messages.
"""

import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

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


def _value_option(
    flag: "_Flag", cls: type[click.Option] = click.Option
) -> Callable[[_Decorated], _Decorated]:
    """Return the option for a flag with a value."""
    complete = complete_model if flag.metavar == "MODEL" else None
    return click.option(
        *flag.names,
        flag.key,
        cls=cls,
        metavar=flag.metavar,
        shell_complete=complete,
        help=flag.about,
    )


class _Flag(NamedTuple):
    key: str
    names: tuple[str, ...]
    metavar: str
    about: str


_MODEL = (
    _Flag(
        "model",
        ("-m", "--model"),
        "MODEL",
        "Model to ask: a name of `localchat list`, or the path of a GGUF file. Default: the one used last.",
    ),
)
_LOAD = (
    _Flag(
        "context_length",
        ("--ctx",),
        "TOKENS",
        "Context length in tokens, for example 4k. Default: the largest that fits.",
    ),
    _Flag(
        "kv_cache_type",
        ("--kv-type",),
        "TYPE",
        "Type of the KV cache: f16, q8_0 or q4_0, with CUDA also bf16 or fp8. Default: f16 or bf16.",
    ),
    _Flag(
        "cache_ram_mib",
        ("--cache-ram",),
        "MIB",
        "RAM for the KV cache of idle conversations, in MiB. Default: half of the free memory, at most 2 GB.",
    ),
    _Flag(
        "cache_disk_gb",
        ("--cache-disk",),
        "GB",
        "Disk space for the KV cache of conversations, in GB. Default: 10.",
    ),
    _Flag(
        "threads", ("--threads",), "N", "Compute threads. 0 uses all physical cores. Default: 0."
    ),
    _Flag(
        "gpu_layers",
        ("--gpu-layers",),
        "N",
        "Layers on the GPU: a number, all or auto. Default: auto, as many as fit.",
    ),
    _Flag(
        "experts_on_cpu",
        ("--experts-on-cpu",),
        "N",
        "Layers whose experts stay in RAM (mixture-of-experts models). Default: auto.",
    ),
    _Flag("vram_gb", ("--vram-gb",), "GB", "Memory limit for each GPU, in GB. Default: none."),
    _Flag("kv_gb", ("--kv-gb",), "GB", "Memory limit for the KV cache, in GB. Default: none."),
    _Flag(
        "quantize",
        ("--quantize",),
        "TYPE",
        "Quantize bf16 layers while loading: fp8, int8 or int4 (CUDA). Default: as stored.",
    ),
    _Flag("draft", ("--draft",), "MODEL", "Draft model for speculative decoding. Default: none."),
    _Flag(
        "backend",
        ("--backend",),
        "NAME",
        "Backend that runs the model; `localchat doctor` lists them. Default: chosen by the file.",
    ),
    _Flag(
        "llamacpp_library",
        ("--llamacpp-library",),
        "PATH",
        "llama.cpp library to load. Default: the first that `localchat doctor` lists.",
    ),
)
_REMOTE = (
    _Flag(
        "remote",
        ("--remote",),
        "URL",
        "Ask an OpenAI-compatible server instead: its address, or a name of the settings file.",
    ),
)
_SAMPLING = (
    _Flag(
        "temperature",
        ("--temp", "--temperature"),
        "X",
        "Randomness. 0 always takes the most likely token. Default: the model maker's value, or 0.7.",
    ),
    _Flag(
        "top_p",
        ("--top-p",),
        "P",
        "Sample from the most likely tokens whose probabilities add up to P. Default: the model "
        "maker's value, or 0.95.",
    ),
    _Flag(
        "top_k",
        ("--top-k",),
        "K",
        "Sample from the K most likely tokens. Default: the model maker's value, or off.",
    ),
    _Flag(
        "min_p",
        ("--min-p",),
        "P",
        "Drop tokens less likely than P times the most likely one. Default: the model maker's "
        "value, or 0.05.",
    ),
    _Flag(
        "seed",
        ("--seed",),
        "N",
        "Random seed, for reproducible output. Default: a new one each time.",
    ),
    _Flag(
        "max_tokens",
        ("--max-tokens",),
        "N",
        "Stop the answer after N tokens. Default: when the model stops, or the context is full.",
    ),
    _Flag(
        "think_budget",
        ("--think-budget",),
        "N",
        "Stop reasoning after N tokens, then answer. Default: no limit.",
    ),
    _Flag("n", ("--n",), "N", "Number of answers. Default: 1."),
)
_SYSTEM = (
    _Flag(
        "system",
        ("-s", "--system"),
        "TEXT",
        "System prompt: instructions before the conversation. Default: none.",
    ),
)
_SCREEN = (
    _Flag(
        "theme",
        ("--theme",),
        "NAME",
        "Colors of the screen: auto, dark, light, high-contrast, ansi or ansi-light. Default: auto.",
    ),
)
_SWITCHES = (
    _Flag(
        "think",
        ("--think/--no-think",),
        "",
        "Let the model reason before it answers. Default: the model decides.",
    ),
    _Flag(
        "hide_reasoning",
        ("--hide-reasoning/--show-reasoning",),
        "",
        "Hide the reasoning. Default: show it.",
    ),
    _Flag(
        "require_gpu",
        ("--require-gpu/--no-require-gpu",),
        "",
        "Fail if the model would run on the CPU alone. Default: off.",
    ),
    _Flag(
        "speculation",
        ("--speculation/--no-speculation",),
        "",
        "Speculative decoding: draft tokens and verify them together. Default: on.",
    ),
    _Flag(
        "loop_guard",
        ("--loop-guard/--no-loop-guard",),
        "",
        "End answers that repeat themselves. Default: on.",
    ),
    _Flag(
        "attach",
        ("--attach/--no-attach",),
        "",
        "Use the models of a running `localchat serve`. Default: on.",
    ),
    _Flag(
        "dummy_weights",
        ("--dummy-weights/--real-weights",),
        "",
        "Random weights, for speed tests without a model's files. Default: off.",
    ),
    _Flag(
        "head_int8",
        ("--head-int8/--head-exact",),
        "",
        "Quantize the output head to 8 bits (CUDA). Default: off.",
    ),
    _Flag(
        "stats",
        ("-v", "--verbose", "--stats/--no-stats"),
        "",
        "Print a line of metrics after the answer. Default: off.",
    ),
    _Flag(
        "anyway",
        ("--anyway/--not-anyway",),
        "",
        "Load even if the model may not fit in memory. Default: off.",
    ),
    _Flag(
        "window_only",
        ("--window-only/--whole-window-cache",),
        "",
        "Layers with a sliding window cache only their window: less memory, fewer prompts reused. "
        "Default: off.",
    ),
    _Flag(
        "quiet",
        ("-q", "--quiet/--no-quiet"),
        "",
        "Print nothing on stderr but errors and what was asked for. Default: off.",
    ),
    _Flag("color", ("--color/--no-color",), "", "Use colors on a terminal. Default: on."),
    _Flag("offline", ("--offline/--no-offline",), "", "Never use the network. Default: off."),
    _Flag("history", ("--history/--no-history",), "", "Store conversations on disk. Default: on."),
    _Flag(
        "reduced_motion",
        ("--reduced-motion/--no-reduced-motion",),
        "",
        "No animations on the screen. Default: off.",
    ),
)
_LOAD_SWITCHES = tuple(
    flag
    for flag in _SWITCHES
    if flag.key
    in ("require_gpu", "dummy_weights", "head_int8", "speculation", "anyway", "window_only")
)

_THINK: Final = "--think"
_THINK_VALUES: Final = {
    "--no-think": ("false", "off", "no", "none", "0"),
    _THINK: ("true", "on", "yes", "1", "low", "medium", "high"),
}
_UNDECIDED = "localchat.cli.options.undecided"
"""Key in the notes of the context for `--think=auto`, which a switch cannot express."""

_NO_CACHE_DISK: Final = "--no-cache-disk"
"""Name of the flag, and its key in the notes of the context."""
AFTER_DASHES = "localchat.cli.options.after_dashes"
"""Key in the notes of the context. True if a `--` precedes the prompt."""
ARGUMENTS = "localchat.cli.options.arguments"
"""Key in the notes of the context for the unparsed arguments of a prompt."""
STOP: Final = "stop"
OPTION: Final = "option"


def engine_options(
    *, with_model: bool, cls: type[click.Option] = click.Option
) -> Callable[[_Decorated], _Decorated]:
    """Add the flags that choose a model, load it and ask it."""

    def decorate(function: _Decorated) -> _Decorated:
        flags = [*_SYSTEM, *_SAMPLING, *_LOAD, *_REMOTE, *_SCREEN]
        if with_model:
            flags = [*_MODEL, *flags]
        decorators = [_value_option(flag, cls) for flag in flags]
        decorators += [
            click.option(
                "-o",
                "--option",
                OPTION,
                cls=cls,
                nargs=2,
                multiple=True,
                metavar="KEY VALUE",
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
        decorators += [
            click.option(*flag.names, flag.key, cls=cls, default=None, help=flag.about)
            for flag in _SWITCHES
        ]
        decorators.append(partial(_no_cache_disk, cls=cls))
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _no_cache_disk(function: _Decorated, cls: type[click.Option] = click.Option) -> _Decorated:
    """Add the flag for `--cache-disk 0`."""

    def note(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            ctx.meta[_NO_CACHE_DISK] = True

    about = "Store no KV cache on disk, like --cache-disk 0."
    add = click.option(
        _NO_CACHE_DISK, cls=cls, is_flag=True, expose_value=False, callback=note, help=about
    )
    return add(function)


def load_flags(function: _Decorated) -> _Decorated:
    """Add the flags of a load, for a command without a prompt."""
    decorators = [_value_option(flag, SharedOption) for flag in _LOAD]
    decorators += [
        click.option(*flag.names, flag.key, cls=SharedOption, default=None, help=flag.about)
        for flag in _LOAD_SWITCHES
    ]
    decorators.append(partial(_no_cache_disk, cls=SharedOption))
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


class ThinkingCommand(click.Command):
    """Accepts `--think=VALUE` besides `--think` and `--no-think`, like Ollama."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        flags = [_thinking(ctx, arg) for arg in args[:end]]
        return super().parse_args(ctx, [flag for flag in flags if flag is not None] + args[end:])


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
    from localchat.config.settings import KEYS, Given

    settings = dict(_options(ctx.params.get(OPTION, ())))
    for key, value in ctx.params.items():
        if key not in KEYS or ctx.get_parameter_source(key) is not ParameterSource.COMMANDLINE:
            continue
        settings[key] = Given(_as_setting(key, value), _flag_name(ctx, key))
    if ctx.meta.get(_NO_CACHE_DISK):
        settings["cache_disk_gb"] = Given("0", _NO_CACHE_DISK)
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
    if key == STOP:
        return [utf8_argument(text) for text in value]
    return value


def _flag_name(ctx: click.Context, key: str) -> str:
    names = next(param.opts for param in ctx.command.params if param.name == key)
    return names[-1]  # the names before it are short, or those of other programs
