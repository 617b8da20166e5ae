"""Sanitizes untrusted text for a terminal. No other module does this.

Text of models, file names, errors of libraries and pastes must not move the cursor, set a title, write the
clipboard or reverse a line. Nothing disappears: dangerous characters are replaced by a visible one, if
possible the picture of the control character. The same applies to invisible characters with a meaning, such
as tags that spell hidden words, and line separators. Characters that scripts need stay: joiners, variation
selectors, direction marks, and zero-width spaces between Khmer words.
"""

import codecs
import re
from typing import Final

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def _table() -> dict[int, str]:
    pictures = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    c1_and_delete = dict.fromkeys(range(128, 160), _REPLACEMENT) | {0x7F: "\u2421"}
    direction = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    separators = {0x2028: "\u2424", 0x2029: "\u2424", 0xAD: "\u2010"}
    hidden = (*range(0x2061, 0x2065), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC))
    tags = range(0xE0000, 0xE0080)
    unseen = dict.fromkeys((*hidden, *tags), _REPLACEMENT)
    surrogates = dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
    return pictures | c1_and_delete | direction | separators | unseen | surrogates


_DANGEROUS: Final = _table()
_MAX_REPLACEMENTS: Final = 12
"""Number of distinct characters up to which replacing them one by one is faster.

It is several times as fast as a table lookup for each letter.
"""


def sanitize(text: str) -> str:
    """Replace control characters other than newline and tab.

    C0 and DEL become their pictures. C1, direction overrides, hidden tags and lone surrogates become the
    replacement character. Unicode's line separators become a newline sign, and a soft hyphen becomes a
    hyphen. Each character is treated alone, so that sequences split by streaming stay harmless.
    """
    dangerous = [letter for letter in set(text) if ord(letter) in _DANGEROUS]
    if len(dangerous) > _MAX_REPLACEMENTS:
        return text.translate(_DANGEROUS)
    for letter in dangerous:
        text = text.replace(letter, _DANGEROUS[ord(letter)])
    return text


def sanitize_line(text: str) -> str:
    """Sanitize text that must stay on one line: names, paths, titles."""
    return one_line(sanitize(text)).replace("\t", " ")


def one_line(text: str) -> str:
    """Replace newlines by a visible sign: in a log, a name with one would pass for two messages."""
    return text.replace("\n", "\u240a")


def fenced(text: str, language: str = "") -> str:
    """Return text as a Markdown code block. Its fence is longer than those in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


_SAMPLE_BYTES: Final = 4096
"""Number of bytes that show whether a text is UTF-16."""


def utf16_text(data: bytes) -> str | None:
    """Decode UTF-16 with or without a byte order mark, as Windows writes it. Return None for other bytes."""
    encoding = utf16_encoding(data)
    if encoding is None:
        return None
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def utf16_encoding(head: bytes) -> str | None:
    """Return the encoding of the first bytes of a UTF-16 text, None for other bytes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Without a mark, Latin text has a zero in most second bytes and in none of the others.
    sample = head[:_SAMPLE_BYTES]
    pairs = len(sample) // 2
    low_zeros = sample[0 : pairs * 2 : 2].count(0)
    high_zeros = sample[1 : pairs * 2 : 2].count(0)
    if pairs < 2 or min(low_zeros, high_zeros) > 0 or max(low_zeros, high_zeros) < pairs * 0.7:
        return None
    encoding = "utf-16-le" if high_zeros else "utf-16-be"
    text = sample[: pairs * 2].decode(encoding, "replace")
    is_text = all(sign.isprintable() or sign in "\t\n\r\f" for sign in text)
    return encoding if is_text else None
