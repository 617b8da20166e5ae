"""Program that renders chat templates for RenderProcess: one JSON object a line in, one a line out.

A line with a `source` has no answer: it is the template of the requests that follow.

jinja2's stock sandbox, with the settings and names that transformers gives to chat templates;
scripts/check_templates compares the two byte by byte. The module is run by its path and imports
jinja2 and the standard library only, to start in 57 ms with 10 MB of its own. It ends at the end of
its input. The kernel ends it, by SIGPROF, when one template computes for too long.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILE = "<template>"
_TEMPLATES_KEPT = 8


class LimitError(Exception):
    """The template exceeds a limit."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's own words for training.

    Here it only renders its body, in a scope of its own as transformers has it.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("render_body"), [], [], body)
        return block.set_lineno(line)

    def render_body(self, caller: Callable[[], str]) -> str:
        """Text of the body."""
        return caller()


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, except that a template may append to a list and pop from it.

    Kimi K2's template queues ids of tool calls so. Lists belong to one render, so nothing is shared.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)


class TemplateRenderer:
    """Compiles and renders templates, a few of them kept compiled."""

    def __init__(self) -> None:
        self._environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self._environment.filters["tojson"] = tojson
        self._environment.globals["raise_exception"] = raise_exception
        self._environment.globals["strftime_now"] = self._strftime_now
        self._now = datetime.now()
        self._compiled = lru_cache(_TEMPLATES_KEPT)(self._compile)

    def variables(self, source: str) -> list[str]:
        """Names that the template reads and does not set."""
        return self._compiled(source)[1]

    def render(self, source: str, values: Mapping[str, Any], now: datetime, most: int) -> str:
        """The text. Raises LimitError beyond `most` characters, and whatever the template raises."""
        self._now = now
        template, _ = self._compiled(source)
        pieces = []
        total = 0
        for piece in template.root_render_func(template.new_context(dict(values))):
            total += len(piece)
            if total > most:
                raise LimitError(f"makes a text of {total:,} characters; {most:,} are allowed")
            pieces.append(piece)
        return "".join(pieces)

    def line(self, source: str, error: BaseException) -> int:
        """Line of the template that raised; 0 where it is not known."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return error.lineno
        line = 0
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code.co_filename == _FILE:
                line = self._compiled(source)[0].get_corresponding_lineno(at.tb_lineno)
            at = at.tb_next
        return line

    def _compile(self, source: str) -> tuple[jinja2.Template, list[str]]:
        tree = self._environment.parse(source)
        variables = sorted(meta.find_undeclared_variables(tree))
        return self._environment.from_string(tree), variables

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - the name that templates use
        return self._now.strftime(format)


def raise_exception(message: str) -> None:
    """`raise_exception(…)` of templates."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,  # noqa: ANN401 - whatever a template computes with
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates: no HTML escapes, letters as they are."""
    if isinstance(value, Iterator):  # `map` and its like; transformers fails on them
        value = list(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@contextmanager
def limited(seconds: float, memory_bytes: int) -> Iterator[None]:
    """Bound what the block computes and allocates.

    ITIMER_PROF counts the time that this process computes, so a busy machine is not held against a
    template; without a handler its signal ends the process even within one long operation of C.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    free = _limit_memory(memory_bytes)
    try:
        yield
    finally:
        free()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(memory_bytes: int) -> Callable[[], None]:
    """Bound the address space to `memory_bytes` more than now; returns what lifts the bound again."""
    try:
        import resource

        pages = int(os.pread(_own_memory(), 64, 0).split()[0])
    except (ImportError, OSError):  # macOS honours no such limit: RenderProcess watches there
        return lambda: None
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + memory_bytes
    if before[0] == resource.RLIM_INFINITY or most < before[0]:
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, before)


@cache
def _own_memory() -> int:
    """Descriptor of the file that tells the size of this process, which each render reads. Raises OSError."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def answer(renderer: TemplateRenderer, source: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Reply to one request: the text, the variables, or why there is none."""
    try:
        with limited(request["seconds"], request["memory_bytes"]):
            if request["values"] is None:
                return {"variables": renderer.variables(source)}
            now = datetime.fromisoformat(request["now"])
            return {"text": renderer.render(source, request["values"], now, request["most"])}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {
            "reason": _reason(error),
            "type": type(error).__name__,
            "message": str(getattr(error, "message", None) or error),
            "line": renderer.line(source, error),
        }


def _reason(error: Exception) -> str:
    """Kind of a failure, as ChatTemplate names it."""
    if isinstance(error, (LimitError, MemoryError, RecursionError)):
        return "limit"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return "syntax"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return "escape"
    # `raise_exception` raises this very class, failures of jinja one of its subclasses.
    if type(error) is jinja2.TemplateError:
        return "refused"
    return "broken"


def main() -> None:
    """Answer until the input ends, at the latest when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the terminal's whole group
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    renderer = TemplateRenderer()
    source = ""
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        if "source" in request:
            source = request["source"]
            continue
        reply = answer(renderer, source, request)
        text = json.dumps(reply, ensure_ascii=False)
        # A conversation may contain half a surrogate pair, which strict UTF-8 refuses.
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
