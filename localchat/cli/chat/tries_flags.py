"""Flags for several tries at one answer. `tries.py` reads them."""

import click

from localchat.tries import MAX_TRIES


def tries_flags(function: "click.decorators.FC") -> "click.decorators.FC":
    """Add the flags."""
    tries = click.IntRange(2, MAX_TRIES)
    for decorator in (
        click.option(
            "--critique",
            is_flag=True,
            help="Let the model review its answer, and keep a correction if that is better.",
        ),
        click.option(
            "--judge", is_flag=True, help="With --best-of: let the model pick the best answer."
        ),
        click.option(
            "--vote-by",
            metavar="KIND",
            help=(
                "What --vote counts: number, text, field:NAME or regex:PATTERN. Default: the last"
                " number."
            ),
        ),
        click.option(
            "--vote",
            type=tries,
            metavar="N",
            help="Try up to N times, and keep the answer that most tries agree on.",
        ),
        click.option(
            "--best-of",
            type=tries,
            metavar="N",
            help="Try N times, and keep the answer with the highest mean log probability.",
        ),
    ):
        function = decorator(function)
    return function
