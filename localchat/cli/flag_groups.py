"""Headings for the flags of a prompt, and the most used flags."""

from collections.abc import Iterator, Sequence
from typing import Final

import click

from localchat.config.parameters import SAMPLERS

DAILY: Final = (
    *("model", "system", "continue_last", "interactive", "files", "extract", "as_json", "schema"),
    *("temperature", "max_tokens"),
)
"""Parameters of the short help, in order."""
ALL_HINT: Final = "localchat --help all lists every flag with its default."

_GROUPS: Final = {
    "Prompt": (
        *("model", "remote", "system", "files", "continue_last", "conversation", "interactive"),
        "raw_prompt",
    ),
    "Answer": (
        *("as_json", "extract", "schema", "grammar", "regex", "max_tokens", "stop", "n"),
        *("require_complete", "loop_guard"),
    ),
    "Sampling": (*SAMPLERS, "seed", "option"),
    "Reasoning": ("think", "think_budget", "hide_reasoning"),
    "Tools": ("tools", "root", "tool_rounds", "yes"),
    "Memory and GPU": (
        *("context_length", "kv_cache_type", "window_only", "cache_ram_mib", "cache_disk_gb"),
        *("threads", "gpus", "gpu_layers", "experts_on_cpu", "require_gpu"),
        *("vram_gb", "kv_gb", "quantize", "draft", "mmproj", "lora", "speculation"),
        *("anyway", "backend", "llamacpp_library", "dummy_weights"),
    ),
    "Output and screen": (
        *("stats", "quiet", "color", "theme", "pictures", "reduced_motion", "screen_reader"),
    ),
    "Program": ("attach", "offline", "history", "version"),
}
_LAST: Final = "Program"


def grouped(options: Sequence[click.Option]) -> Iterator[tuple[str, list[click.Option]]]:
    """Yield each heading with its flags. The last one gets all flags without a heading."""
    grouped_names = {name for names in _GROUPS.values() for name in names}
    for heading, names in _GROUPS.items():
        members = [option for name in names for option in options if option.name == name]
        if heading == _LAST:
            members += [option for option in options if option.name not in grouped_names]
        if members:
            yield heading, members


def write_short(
    ctx: click.Context, formatter: click.HelpFormatter, options: Sequence[click.Option]
) -> None:
    """Write the most used flags, and how to list all of them."""
    by_name = {option.name: option for option in options}
    records = [by_name[name].get_help_record(ctx) for name in DAILY if name in by_name]
    with formatter.section("Flags that you will use most"):
        formatter.write_dl([record for record in records if record is not None])
    formatter.write_paragraph()
    formatter.write_text(ALL_HINT)


def write_all(
    ctx: click.Context, formatter: click.HelpFormatter, options: Sequence[click.Option]
) -> None:
    """Write all flags under their headings."""
    for heading, members in grouped(options):
        records = [option.get_help_record(ctx) for option in members]
        with formatter.section(heading):
            formatter.write_dl([record for record in records if record is not None])
