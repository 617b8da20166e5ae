"""Separate the words of a prompt from its flags before click parses them."""

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

_MARK = "\0"
"""Prefix that hides the dash of a word from click. No shell can pass a zero byte."""


class _Argument(NamedTuple):
    text: str
    is_word: bool


def marked(args: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """Mark words that look like flags to click, such as `-5 + 3`."""
    texts = []
    for argument in _arguments(args, params):
        is_dashed = len(argument.text) > 1 and argument.text.startswith("-")
        mark = _MARK if argument.is_word and is_dashed else ""
        texts.append(mark + argument.text)
    return texts


def unmarked(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words without the marks."""
    return tuple(text.removeprefix(_MARK) for text in words)


def prompt_line(args: Sequence[str], params: Sequence[click.Parameter]) -> str:
    """Return the command line that sends the words as a prompt, with the same flags."""
    end = args.index("--") if "--" in args else len(args)
    arguments = list(_arguments(args[:end], params))
    flags = [argument.text for argument in arguments if not argument.is_word]
    words = [argument.text for argument in arguments if argument.is_word]
    return shlex.join(["localchat", *flags, "--", *words, *args[end + 1 :]])


def has_other_flags(args: Sequence[str], params: Sequence[click.Parameter]) -> bool:
    """Return True if a flag is none of these parameters."""
    value_counts = _value_counts(params)
    for argument in _arguments(args, params):
        text = argument.text
        if argument.is_word or not text.startswith("-"):
            continue
        flag = text[:2]
        if text.startswith("--"):
            flag = text.partition("=")[0]
        if flag not in value_counts:
            return True
    return False


def _arguments(args: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[_Argument]:
    """Yield each argument, and whether it is a word. Click parses everything after `--`."""
    value_counts = _value_counts(params)
    values_left = 0
    for index, text in enumerate(args):
        if text == "--":
            yield from (_Argument(text, is_word=False) for text in args[index:])
            return
        if values_left:
            values_left -= 1
            yield _Argument(text, is_word=False)
            continue
        is_word = not text.startswith("-") or text == "-" or _is_dashed_word(text, value_counts)
        yield _Argument(text, is_word)
        if not is_word:
            values_left = value_counts.get(text, 0)


def _is_dashed_word(text: str, value_counts: dict[str, int]) -> bool:
    """Return True for a dash before a digit, or in a text with spaces."""
    if text.startswith("--"):
        return " " in text.partition("=")[0]
    if value_counts.get(text[:2]):
        # The rest is the value of the flag.
        return False
    return text[1].isdigit() or any(sign.isspace() for sign in text)


def _value_counts(params: Sequence[click.Parameter]) -> dict[str, int]:
    """Return how many values follow each flag, by its spellings."""
    counts = {"-h": 0, "--help": 0}
    for param in params:
        if isinstance(param, click.Option):
            count = 0 if param.is_flag or param.count else param.nargs
            counts |= dict.fromkeys((*param.opts, *param.secondary_opts), count)
    return counts
