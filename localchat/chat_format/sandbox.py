"""jinja2's immutable sandbox, with a meter in every operation of the compiled template.

The sandbox keeps a template from Python's internals; it does not keep it from running for ever or
from taking all memory (that has brought servers down: CVE-2025-62426 and its kin). Here every
operation that a template makes passes through a method of the environment, which asks the meter
(meter.py) before and counts after; filters and methods that can blow up are foreseen by guards.py.

Meaning and output are those of jinja2 with the settings and names that transformers gives to chat
templates; scripts/tools/check_templates compares them byte by byte. On purpose different:
reading a hidden attribute of an object is refused at once (jinja prints it as empty), a namespace
cannot be printed, and `lipsum` is gone.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import update_wrapper, wraps
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
    is_internal_attribute,
)
from markupsafe import Markup

from localchat.chat_format import guards
from localchat.chat_format.compiler import GenerationTag, MeteredCode
from localchat.chat_format.meter import Limits, Measure, Meter, Value, exceeded
from localchat.chat_format.names import TemplateDict, TemplateNamespace, refuse

_OPERATORS = frozenset({"+", "-", "*", "/", "//", "**", "%"})

_HANDS_ON = frozenset({"attr", "d", "default", "first", "last", "max", "min", "random", "safe"})
"""Filters that answer with what they were given: nothing is made."""

_MAKES_ITEMS = frozenset({"batch", "items", "slice"})
_MOST_FORMAT = 256


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one chat template. `meter` is set for each compilation and render: one at
    a time.

    now: the clock behind `strftime_now`.
    """

    code_generator_class = MeteredCode
    intercepted_binops = _OPERATORS

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._printed,
        )
        self.meter = Meter(Limits())
        self._now = now
        filters: dict[str, Any] = {**self.filters, "tojson": self._tojson, "sum": self._sum}
        tests: dict[str, Any] = {**self.tests}
        self.filters = {name: self._metered(name, run, True) for name, run in filters.items()}
        self.tests = {name: self._metered(name, run, False) for name, run in tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = self._strftime_now
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace

    # ---------------------------------------------------------------- called by compiled templates

    def passed(self, value: Value) -> Value:
        """A comparison's result."""
        self.meter.tick()
        return value

    def made(self, value: Value) -> Value:
        """A literal container."""
        return self.meter.made(value)

    def concatenated(self, join: Callable[[Iterable[Any]], str], parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ …`."""
        total = 0
        for part in parts:
            total += self.meter.measure(part).size
            self.meter.foresee(total - 8 * len(parts))
        text: str = self.meter.made(join(parts))
        return text

    def sliced(self, value: Value, start: Value, stop: Value, step: Value) -> Value:
        """`value[start:stop:step]`; a part weighs no more than the whole."""
        part = value[start:stop:step]
        return self.meter.made(part, self.meter.measure(value))

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a macro, a block or a `set` block."""
        return self.meter.joined(pieces)

    def _printed(self, value: Value) -> Value:
        if isinstance(value, str):
            return self.passed(value)
        return self.meter.made(str(value))

    # ---------------------------------------------------------------- jinja's own hooks

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        meter = self.meter
        meter.tick()
        measure = None
        if operator == "*":
            guards.product(meter, left, right)
        elif operator == "**":
            guards.power(left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            guards.percent(meter, left, right)
        elif operator == "+" and isinstance(left, (list, tuple)) and type(left) is type(right):
            one, two = meter.measure(left), meter.measure(right)
            measure = Measure(one.size + two.size, max(one.depth, two.depth))
        return meter.made(self.binop_table[operator](left, right), measure)

    def call(self, context: Context, obj: Value, /, *args: Value, **kwargs: Value) -> Value:
        owner = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(owner, (str, bytes, int, type)) and (guard := guards.METHODS.get(name)):
            args = guard(self.meter, owner, args, kwargs) or args
        result = super().call(context, obj, *args, **kwargs)
        if name == "get" and isinstance(owner, dict):
            return self.passed(result)
        return self.meter.made(result)

    def getitem(self, obj: Value, argument: Value) -> Value:
        self.meter.tick()
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Value, attribute: str) -> Undefined:
        if attribute.startswith("_") or is_internal_attribute(obj, attribute):
            raise jinja2.exceptions.SecurityError(
                f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe."
            )
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Value) -> Callable[..., str] | None:
        """`str.format` and `format_map`, their fields read through the sandbox and their widths
        bounded."""
        if not isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            return None
        text = value.__self__
        if value.__name__ not in ("format", "format_map") or not isinstance(text, str):
            return None
        formatter = (
            _EscapeFields(self, escape=text.escape) if isinstance(text, Markup) else _Fields(self)
        )
        by_map = value.__name__ == "format_map"

        def run(*args: Value, **kwargs: Value) -> str:
            if not by_map:
                return type(text)(formatter.vformat(text, args, kwargs))
            if kwargs or len(args) != 1:
                raise TypeError(f"format_map() takes exactly one argument ({len(args)} given)")
            return type(text)(formatter.vformat(text, (), args[0]))

        return update_wrapper(run, value)

    # ---------------------------------------------------------------- filters and names

    def _metered(self, name: str, run: Callable[..., Any], filters: bool) -> Callable[..., Any]:
        """A filter or test with the meter around it; jinja's mark for a first argument is kept."""
        at = 1 if hasattr(run, "jinja_pass_arg") else 0
        guard = guards.FILTERS.get(name) if filters else None

        @wraps(run)
        def metered(*args: Value, **kwargs: Value) -> Value:
            self.meter.tick()
            if name == "join" and len(args) > at and isinstance(args[at], Iterator):
                args = (*args[:at], self.meter.made(list(args[at])), *args[at + 1 :])
            if guard is not None and len(args) > at:
                guard(self.meter, args[at], args[at + 1 :], kwargs)
            result = run(*args, **kwargs)
            if not filters or name in _HANDS_ON or (len(args) > at and result is args[at]):
                return result
            if isinstance(result, Iterator):
                return self.meter.watched(result, new=name in _MAKES_ITEMS)
            return self.meter.made(result)

        return metered

    def _tojson(
        self,
        value: Value,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as transformers writes it for templates: no HTML escapes, letters as they are. What a filter
        gives item by item (`map`) is a list."""
        if isinstance(value, Iterator):
            value = self.meter.made(list(value))
        return guards.to_json(
            self.meter,
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _sum(
        self, items: Iterable[Any], attribute: str | int | None = None, start: Value = 0
    ) -> Value:
        """jinja's `sum`, item by item: a sum of lists copies them again and again."""
        total = start
        for item in items:
            value = item if attribute is None else _attribute(self, item, attribute)
            total = self.call_binop(None, "+", total, value)  # type: ignore[arg-type]
        return total

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - the name that templates use
        if len(format) > _MOST_FORMAT or any(len(run) > 2 for run in _digits(format)):
            raise exceeded("asks for a date in an overlong format")
        return self._now().strftime(format)


class _Fields(SandboxedFormatter):
    """`'{…}'.format(…)`."""

    def format_field(self, value: Value, format_spec: str) -> str:
        meter: Meter = self._env.meter  # type: ignore[attr-defined]
        guards.field_spec(meter, format_spec)
        text: str = meter.made(super().format_field(value, format_spec))
        return text


class _EscapeFields(_Fields, SandboxedEscapeFormatter):
    """The same for text marked safe."""


def _digits(text: str) -> list[str]:
    return "".join(letter if letter.isdigit() else " " for letter in text).split()


def _attribute(sandbox: Sandbox, item: Value, attribute: str | int) -> Value:
    parts = str(attribute).split(".") if isinstance(attribute, str) else [attribute]
    for part in parts:
        item = sandbox.getitem(item, int(part) if str(part).isdigit() else part)
    return item
