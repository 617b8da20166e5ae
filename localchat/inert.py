"""Text from outside, made harmless for a terminal: the one place where that happens.

Whatever a model, a file name, an error of a library or a paste holds, after this no byte of it can move the
cursor, set a title, write the clipboard or turn the direction of a line. Nothing vanishes: what is
dangerous is shown as a sign, as the picture of its control character where Unicode has one.
"""

from typing import Final

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def _table() -> dict[int, str]:
    pictures = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    c1_and_delete = dict.fromkeys(range(128, 160), _REPLACEMENT) | {0x7F: "\u2421"}
    direction = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    surrogates = dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
    return pictures | c1_and_delete | direction | surrogates


_DANGEROUS: Final = _table()


def inert(text: str) -> str:
    """`text` without control characters other than newline and tab: C0 and DEL become their pictures; C1,
    overrides of the writing direction and lone surrogates the replacement character. Each character is
    judged alone, so a sequence cut anywhere by streaming stays harmless."""
    return text.translate(_DANGEROUS)


def inert_line(text: str) -> str:
    """The same for text that must stay on one line: names, paths, titles."""
    return inert(text).replace("\n", "\u240a").replace("\t", " ")
