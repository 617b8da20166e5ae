"""What chat templates find under the names `dict`, `namespace` and `raise_exception`."""

from typing import Any

import jinja2
from jinja2.utils import Namespace

from localchat.chat_format import guards
from localchat.chat_format.meter import Value


class TemplateDict:
    """`dict(…)` in templates: makes dicts, and is no type that could be climbed."""

    def __call__(self, *args: Value, **kwargs: Value) -> dict[Any, Any]:
        return dict(*guards.few_keys(args), **kwargs)

    def fromkeys(self, *args: Value) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*guards.few_keys(args))


class TemplateNamespace(Namespace):
    """`namespace(…)` in templates: holds what a loop wants to remember, under public names only."""

    def __init__(*args: Value, **kwargs: Value) -> None:
        space, rest = args[0], args[1:]
        values = dict(*guards.few_keys(rest), **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(space, values)

    def __repr__(self) -> str:
        # Namespaces are the one thing that can be made to hold itself, or to unfold without end.
        raise jinja2.TemplateRuntimeError("a namespace is printed")

    def __setitem__(self, name: str, value: Value) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Value) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no underscore name such as {name!r}"
        )


def refuse(message: str) -> None:
    """`raise_exception(…)` in templates."""
    raise jinja2.exceptions.TemplateError(message)
