"""Flags for more tries at one answer; `tries_options.py` reads them."""

import click

MOST_TRIES = 16


def tries_flags(function: "click.decorators.FC") -> "click.decorators.FC":
    """Add the flags."""
    tries = click.IntRange(2, MOST_TRIES)
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
