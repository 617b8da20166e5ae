"""Program that renders chat templates for RenderProcess.

It reads and writes one JSON object per line. A line with a `source` has no reply and sets the template of the
following requests. The program exits at the end of its input. The kernel kills it with SIGPROF if a template
computes for too long.

It uses jinja2's sandbox with transformers' settings and names for chat templates, and scripts/check_templates
compares the two byte by byte. The module runs by its path and imports only jinja2 and the standard library, so
that it starts in 57 ms and adds 10 MB.
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
_CACHED_TEMPLATES = 8


class LimitError(Exception):
    """Raised when a template exceeds a limit."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text for training.

    It only renders its body, in a scope of its own as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("render_body"), [], [], body)
        return block.set_lineno(line)

    def render_body(self, caller: Callable[[], str]) -> str:
        """Return the text of the body."""
        return caller()


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, except that a template may append to a list and pop from it.

    Kimi K2's template needs this for a queue of tool call ids. A list belongs to one render, so this is safe.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)


class TemplateRenderer:
    """Compiles and renders templates, and caches a few compiled ones."""

    def __init__(self) -> None:
        self._environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self._environment.filters["tojson"] = tojson
        self._environment.globals["raise_exception"] = raise_exception
        self._environment.globals["strftime_now"] = self._strftime_now
        self._now = datetime.now()
        self._compiled = lru_cache(_CACHED_TEMPLATES)(self._compile)

    def variables(self, source: str) -> list[str]:
        """Return the names that the template reads but does not set."""
        return self._compiled(source)[1]

    def render(
        self, source: str, values: Mapping[str, Any], now: datetime, max_characters: int
    ) -> str:
        """Render a template. Raises LimitError, and whatever the template raises."""
        self._now = now
        template, _ = self._compiled(source)
        pieces = []
        total = 0
        for piece in template.root_render_func(template.new_context(dict(values))):
            total += len(piece)
            if total > max_characters:
                raise LimitError(
                    f"makes a text of {total:,} characters; {max_characters:,} are allowed"
                )
            pieces.append(piece)
        return "".join(pieces)

    def line(self, source: str, error: BaseException) -> int:
        """Return the line of the template that raised the error, 0 if unknown."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return error.lineno
        line = 0
        entry = error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code.co_filename == _FILE:
                line = self._compiled(source)[0].get_corresponding_lineno(entry.tb_lineno)
            entry = entry.tb_next
        return line

    def _compile(self, source: str) -> tuple[jinja2.Template, list[str]]:
        tree = self._environment.parse(source)
        variables = sorted(meta.find_undeclared_variables(tree))
        return self._environment.from_string(tree), variables

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - the name that templates use
        return self._now.strftime(format)


def raise_exception(message: str) -> None:
    """Implement `raise_exception(…)` of templates."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,  # noqa: ANN401 - whatever a template computes with
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers does: without HTML escapes, and with Unicode letters."""
    if isinstance(value, Iterator):
        # Filters such as `map` return iterators, on which transformers fails.
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
    """Limit the CPU time and memory of the block.

    ITIMER_PROF counts CPU time, so a busy machine does not count against a template. Its signal has no handler,
    so it kills the process even inside a long operation in C.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    lift_limit = _limit_memory(memory_bytes)
    try:
        yield
    finally:
        lift_limit()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(memory_bytes: int) -> Callable[[], None]:
    """Limit the growth of the address space. Return a function that lifts the limit."""
    try:
        import resource

        pages = int(os.pread(_own_memory(), 64, 0).split()[0])
    except (ImportError, OSError):
        # macOS does not enforce such limits. RenderProcess watches the memory there.
        return lambda: None
    previous = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + memory_bytes
    if previous[0] == resource.RLIM_INFINITY or limit < previous[0]:
        resource.setrlimit(resource.RLIMIT_AS, (limit, previous[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, previous)


@cache
def _own_memory() -> int:
    """Open the file with the size of this process, and return its descriptor. Raises OSError."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def answer(renderer: TemplateRenderer, source: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to a request: the text, the variables, or an error."""
    try:
        with limited(request["seconds"], request["memory_bytes"]):
            if request["values"] is None:
                return {"variables": renderer.variables(source)}
            now = datetime.fromisoformat(request["now"])
            text = renderer.render(source, request["values"], now, request["max_characters"])
            return {"text": text}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {
            "reason": _reason(error),
            "type": type(error).__name__,
            "message": str(getattr(error, "message", None) or error),
            "line": renderer.line(source, error),
        }


def _reason(error: Exception) -> str:
    """Return the reason of a failure, as ChatTemplate defines it."""
    if isinstance(error, (LimitError, MemoryError, RecursionError)):
        return "limit"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return "syntax"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return "escape"
    # `raise_exception` raises exactly this class. Failures of jinja raise subclasses.
    if type(error) is jinja2.TemplateError:
        return "refused"
    return "broken"


def main() -> None:
    """Reply to requests until the input ends, at the latest when the parent process exits."""
    # Ctrl+C reaches the terminal's whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        # A conversation may contain a lone surrogate, which strict UTF-8 rejects.
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
