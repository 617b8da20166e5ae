"""Operations of templates whose result, or whose time, can be far larger than their operands.

Each guard looks at the arguments before the operation runs. Two tables, by name: methods of
strings, bytes and numbers, and jinja filters. What is in neither costs about what its operands
weigh (meter.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

from localchat.chat_format.meter import MOST_BITS, Meter, Value, exceeded

Arguments: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]
Guard: TypeAlias = Callable[[Meter, Any, Arguments, Options], Arguments | None]
"""(meter, value, arguments, options): None, or arguments to use in place of these."""

_MOST_COMPARED = 200_000_000
"""Steps of the searches that CPython does naively (from the right, and in sets to strip)."""

_MOST_COSTLY = 16_384
"""Deep size that the slow filters and methods may look at: regular expressions, Python loops."""

_MOST_KEYS = 16_384
"""Keys at once from a sequence: a dict of crafted integers takes quadratic time."""

_CODECS = frozenset({"utf-8", "utf8", "ascii", "latin-1", "latin1"})
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def percent(meter: Meter, pattern: str | bytes, values: Value) -> None:
    """`pattern % values`: refuses large widths and repeated large values."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    total, conversions = len(text), 0
    for width, precision in _CONVERSION.findall(text):
        conversions += 1
        if "*" in (width, precision):
            raise exceeded("uses a width given by «*»")
        total += _number(width) + _number(precision)
        meter.foresee(total)
    weight = meter.measure(values).size
    meter.foresee(total + weight * (conversions if isinstance(values, Mapping) else 1))


def field_spec(meter: Meter, spec: str) -> None:
    """A format specification such as `>20`: refuses large widths."""
    for digits in re.findall(r"\d+", spec):
        meter.foresee(_number(digits))


def product(meter: Meter, left: Value, right: Value) -> None:
    """`left * right`: refuses long sequences and long numbers."""
    if isinstance(left, int) and isinstance(right, int):
        _bits(left.bit_length() + right.bit_length())
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
            text = isinstance(sequence, (str, bytes))
            size = len(sequence) if text else meter.measure(sequence).size
            meter.foresee(size * max(times, 0))


def power(left: Value, right: Value) -> None:
    """`left ** right`: refuses long numbers."""
    if isinstance(left, int) and isinstance(right, int):
        _bits(left.bit_length() * abs(right))


def _bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise exceeded("makes a number too long to print")


def _number(digits: str) -> int:
    return int(digits[:12]) if digits else 0


def _argument(arguments: Arguments, options: Options, at: int, name: str, default: Value) -> Value:
    return arguments[at] if len(arguments) > at else options.get(name, default)


def _length(value: Value) -> int:
    return len(value) if isinstance(value, (str, bytes)) else 8


# ---------------------------------------------------------------------------- both


def _pad(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    width = _argument(arguments, options, 0, "width", 80)
    if isinstance(width, int):
        meter.foresee(width)


def _costly(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    if meter.measure(value).size > _MOST_COSTLY:
        raise exceeded("uses a slow filter on a long text")


def _strip(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    characters = _argument(arguments, options, 0, "chars", None)
    if _length(characters) * _length(value) > _MOST_COMPARED:
        raise exceeded("strips too many characters from a long text")


# ---------------------------------------------------------------------------- methods


def _search(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    needle = _argument(arguments, options, 0, "sep", None)
    if _length(needle) * _length(value) > _MOST_COMPARED:
        raise exceeded("searches for a long text in a long text")
    _split(meter, value, arguments, options)


def _split(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    separator = _argument(arguments, options, 0, "sep", None)
    if separator and type(separator) is type(value):
        meter.charge(60 * value.count(separator))


def _expandtabs(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    size = _argument(arguments, options, 0, "tabsize", 8)
    if isinstance(size, int):
        tabs = value.count("\t" if isinstance(value, str) else b"\t")
        meter.foresee(_length(value) + tabs * size)


def _replace(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    old, new = arguments[:2] if len(arguments) >= 2 else (options.get("old"), options.get("new"))
    if isinstance(old, (str, bytes)) and isinstance(new, (str, bytes)):
        found = value.count(old) if isinstance(old, str) is isinstance(value, str) else 0
        meter.foresee(_length(value) + found * len(new))


def _replace_filter(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    old = _argument(arguments, options, 0, "old", "")
    new = _argument(arguments, options, 1, "new", "")
    if isinstance(value, str) and isinstance(old, str):
        meter.foresee(len(value) + value.count(str(old)) * meter.measure(new).size)
    else:
        _costly(meter, [value, old, new], arguments, options)


def _join(meter: Meter, value: Value, arguments: Arguments, options: Options) -> Arguments | None:
    if not arguments or not isinstance(arguments[0], Iterable):
        return None
    items: Value = arguments[0]
    if isinstance(items, Iterator):
        items = meter.made(list(items))
    count = len(items) if hasattr(items, "__len__") else 0
    meter.foresee(meter.measure(items).size + count * _length(value))
    return (items, *arguments[1:])


def _translate(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    table = arguments[0] if arguments else None
    targets = table.values() if isinstance(table, dict) else table
    if isinstance(targets, Iterable) and not isinstance(targets, (str, bytes)):
        longest = max((_length(target) for target in meter.watched(targets)), default=0)
        meter.foresee(_length(value) * longest)


def _codec(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    name = _argument(arguments, options, 0, "encoding", "utf-8")
    if isinstance(name, str) and name.lower() not in _CODECS:
        raise exceeded(f"uses the text encoding {name[:40]!r}")


def _to_bytes(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    length = _argument(arguments, options, 0, "length", 1)
    if isinstance(length, int):
        meter.foresee(length)


def few_keys(arguments: Arguments) -> Arguments:
    """The arguments of `dict(…)`, refused where they are a long sequence and no dict."""
    if not arguments or isinstance(arguments[0], dict) or not isinstance(arguments[0], Iterable):
        return arguments
    items: Value = arguments[0]
    if isinstance(items, Iterator):
        items = list(islice(items, _MOST_KEYS + 1))
    if len(items) > _MOST_KEYS:
        raise exceeded(f"makes a dict of more than {_MOST_KEYS:,} keys at once")
    return (items, *arguments[1:])


def _keys(meter: Meter, value: Value, arguments: Arguments, options: Options) -> Arguments:
    return few_keys(arguments)


METHODS: Mapping[str, Guard] = {
    "center": _pad,
    "decode": _codec,
    "encode": _codec,
    "expandtabs": _expandtabs,
    "fromkeys": _keys,
    "join": _join,
    "ljust": _pad,
    "lstrip": _strip,
    "maketrans": _keys,
    "replace": _replace,
    "rfind": _search,
    "rindex": _search,
    "rjust": _pad,
    "rpartition": _search,
    "rsplit": _search,
    "rstrip": _strip,
    "split": _split,
    "strip": _strip,
    "striptags": _costly,
    "to_bytes": _to_bytes,
    "translate": _translate,
    "zfill": _pad,
}
"""Methods of str, bytes and int (and the class methods of their types), by name."""


# ---------------------------------------------------------------------------- filters


def _batch(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    count = _argument(
        arguments, options, 0, "linecount", _argument(arguments, options, 0, "slices", 1)
    )
    if isinstance(count, int):
        meter.foresee(8 * count)
        meter.charge(8 * max(count, 0))


def _format(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    percent(meter, str(value), options or arguments)


def _indent(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    width = _argument(arguments, options, 0, "width", 4)
    lines = value.count("\n") + 1 if isinstance(value, str) else 1
    meter.foresee(lines * (width if isinstance(width, int) else _length(width)))


def _join_filter(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    between = _argument(arguments, options, 0, "d", "")
    count = len(value) if hasattr(value, "__len__") else 0
    meter.foresee(meter.measure(value).size + count * meter.measure(between).size)


def _letters(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    if isinstance(value, str):
        meter.charge((8 if value.isascii() else 84) * len(value))


def _round(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    precision = _argument(arguments, options, 0, "precision", 0)
    if isinstance(precision, int):
        meter.foresee(abs(precision) * 10_000)


def _tojson(meter: Meter, value: Value, arguments: Arguments, options: Options) -> None:
    indent = _argument(arguments, options, 1, "indent", None)
    separators = _argument(arguments, options, 2, "separators", None)
    step = indent if isinstance(indent, int) else _length(indent) if indent is not None else 0
    size, depth = meter.measure(value)
    between = meter.measure(separators).size if separators else 4
    meter.foresee(size + (size // 8) * (max(step, 0) * depth + between))


FILTERS: Mapping[str, Guard] = {
    "batch": _batch,
    "center": _pad,
    "format": _format,
    "indent": _indent,
    "join": _join_filter,
    "list": _letters,
    "pprint": _costly,
    "replace": _replace_filter,
    "round": _round,
    "slice": _batch,
    "striptags": _costly,
    "title": _costly,
    "tojson": _tojson,
    "trim": _strip,
    "unique": _letters,
    "urlize": _costly,
    "wordwrap": _costly,
    "xmlattr": _costly,
}
"""Filters, by name. `join` sees a list where it was given an iterator."""


def to_json(meter: Meter, value: Value, **options: Value) -> str:
    """`json.dumps`, asking the clock where an indent makes Python's slow encoder do the work."""
    if options.get("indent") is None:
        return json.dumps(value, **options)
    return meter.joined(meter.watched(json.JSONEncoder(**options).iterencode(value)))
