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
            help="Let the model judge its answer and mend the faults that it finds.",
        ),
        click.option(
            "--judge", is_flag=True, help="With --best-of: the model itself picks the best."
        ),
        click.option(
            "--vote-by",
            metavar="KIND",
            help="What a vote counts: number (the last one), text, field:NAME or regex:PATTERN.",
        ),
        click.option(
            "--vote",
            type=tries,
            metavar="N",
            help="Try up to N times at once; the answer that most agree on. Ends when decided.",
        ),
        click.option(
            "--best-of",
            type=tries,
            metavar="N",
            help="Try N times at once; the answer with the highest mean log probability.",
        ),
    ):
        function = decorator(function)
    return function
