"""Fill-in-the-middle prompts, in the tokens that a model was trained on for them.

These models share the order prefix, suffix, middle (Bavarian et al. 2022). Other files of the repository come
first, as Qwen2.5-Coder's report describes: a name of the repository, then each file after a separator and its
name. This is a module of its own, because the prompt format changes with the models and not with the input
processor.
"""

from collections.abc import Callable

from localchat.backend_api.interface import Tokenizer
from localchat.engine.request import Infill
from localchat.errors import UsageError

_NAMES = ("fim_pre", "fim_suf", "fim_mid")
_REPOSITORY = "repository\n"
_THIS_FILE = "file\n"
"""Placeholder names, if the format requires one."""


def infill_tokens(
    infill: Infill, tokenizer: Tokenizer, plain: Callable[[str], list[int]]
) -> list[int]:
    """Build the whole prompt. `plain` tokenizes text without markup.

    Raises UsageError for a model without these tokens, and what `plain` raises.
    """
    before, after, middle = (tokenizer.special(name) for name in _NAMES)
    missing = [name for name in _NAMES if tokenizer.special(name) < 0]
    if missing:
        raise UsageError(
            f"this model has no fill-in-the-middle tokens ({', '.join(missing)})",
            hint="use a coder model that was trained for it, such as qwen2.5-coder",
        )
    tokens: list[int] = []
    if tokenizer.add_bos and tokenizer.bos >= 0:
        tokens.append(tokenizer.bos)
    if infill.extra:
        tokens += _other_files(infill, tokenizer, plain)
    return [*tokens, before, *plain(infill.prefix), after, *plain(infill.suffix), middle]


def _other_files(
    infill: Infill, tokenizer: Tokenizer, plain: Callable[[str], list[int]]
) -> list[int]:
    separator = tokenizer.special("fim_sep")
    repository = tokenizer.special("fim_rep")
    if separator < 0:
        return [token for name, text in infill.extra for token in plain(f"{name}\n{_ended(text)}")]
    tokens: list[int] = []
    if repository >= 0:
        tokens = [repository, *plain(_REPOSITORY)]
    for name, text in infill.extra:
        tokens += [separator, *plain(f"{name}\n{_ended(text)}")]
    return [*tokens, separator, *plain(_THIS_FILE)]


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"
