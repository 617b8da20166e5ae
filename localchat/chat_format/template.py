"""A model's own chat template: source in, prompt text out, or a TemplateError that says why not.

Output equals transformers' `apply_chat_template` (settings, filters, names,
`continue_final_message`); the limits and the sandbox are described in meter.py and sandbox.py. One
render runs at a time per template.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta

from localchat.chat_format.meter import Limits, Meter, exceeded
from localchat.chat_format.sandbox import Sandbox
from localchat.errors import TemplateError

_FILE = "<chat template>"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})

_HERE = "LOCALCHAT_GOES_ON_HERE "
"""Put behind the text to prolong, and cut off with all that follows. The blank at its end shows
whether the template trims."""


class ChatTemplate:
    """One jinja chat template, compiled at the first use.

    special_tokens: texts by the names that templates use (`bos_token`, `eos_token`, …). now: the
    clock of `strftime_now`. clock: seconds for the limits. Every method that compiles or renders
    raises TemplateError with `details["reason"]`: `syntax`, `refused` (the template's own
    raise_exception), `broken` (it fails), `escape` (it reaches for what the sandbox hides),
    `limit`, `input`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or Limits()
        self._clock = clock
        self._sandbox = Sandbox(now)
        self._compiled: jinja2.Template | None = None
        self._variables: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set: its switches, such as
        `enable_thinking`."""
        with self._lock:
            self._ready()
        return self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. `messages`, `tools` and `options` are plain data as JSON has it, and reach
        the template as they are; an option takes precedence over a special token of the same
        name."""
        options = dict(options or {})
        if taken := sorted(_RESERVED & options.keys()):
            raise TemplateError(
                f"A template option may not be named {', '.join(taken)}.", reason="input"
            )
        values = {
            "documents": None,
            **self._special_tokens,
            **options,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            template = self._ready()
            meter = Meter(self._limits, clock=self._clock)
            self._sandbox.meter = meter
            with self._translated():
                meter.take_input(values)
                return meter.joined(template.root_render_func(template.new_context(values)))

    def prolong(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        field: str = "content",
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt cut off right behind the last message's `field`, so that the model goes on
        with it."""
        if not messages or not isinstance(said := messages[-1].get(field), str):
            raise _cannot_prolong(f"the last message has no {field}")
        copies = [name for name in _copies(field) if messages[-1].get(name) == said]
        if not any(name in self.source for name in copies):
            raise _cannot_prolong(f"its template does not read {field}")
        last = {**messages[-1], **dict.fromkeys(copies, said + _HERE)}
        text = self.render(
            [*messages[:-1], last], tools=tools, options=options, add_generation_prompt=False
        )
        mark = _HERE.strip()
        if mark not in text or said.strip() not in text:
            raise _cannot_prolong("its template leaves out the end of the last message")
        at = text.rindex(mark)
        trimmed = not text.startswith(_HERE, at)
        return text[:at].rstrip() if trimmed else text[:at]

    def _ready(self) -> jinja2.Template:
        if self._compiled is not None:
            return self._compiled
        limits = self._limits
        if len(self.source) > limits.source:
            raise exceeded(
                f"is {len(self.source):,} characters long; {limits.source:,} are allowed"
            )
        sandbox = self._sandbox
        sandbox.meter = Meter(limits, seconds=limits.compile_seconds, clock=self._clock)
        with self._translated():
            tree = sandbox.parse(self.source)
            self._variables = frozenset(meta.find_undeclared_variables(tree))
            python = sandbox.compile(tree, raw=True)
            if len(python) > limits.compiled:
                raise exceeded("becomes too long a program")
            code = compile(python, _FILE, "exec")
            self._compiled = sandbox.template_class.from_code(
                sandbox, code, sandbox.make_globals(None)
            )
        return self._compiled

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Whatever a template can raise becomes a TemplateError: it can raise anything."""
        try:
            yield
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The model's chat template cannot be read, line {error.lineno}: {error.message}.",
                hint="Another file of this model may have a sound template.",
                reason="syntax",
                line=error.lineno,
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(
                f"The model's chat template was stopped: {error}",
                hint="It may mean harm: do not use this file unless you trust its source.",
                reason="escape",
                line=self._line(error),
            ) from error
        except jinja2.TemplateError as error:
            if type(error) is not jinja2.TemplateError:
                raise self._broken(error) from error
            raise TemplateError(
                f"The model's chat template refuses this conversation: {error.message}",
                hint="It has rules for roles, their order or options: change the messages to suit.",
                reason="refused",
                line=self._line(error),
            ) from error
        except RecursionError as error:
            raise exceeded("nests, or calls itself, too deep") from error
        except MemoryError as error:
            raise exceeded("takes too much memory") from error
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> TemplateError:
        line = self._line(error)
        where = f", line {line}" if line else ""
        what = f"{type(error).__name__}: {error}"[:500]
        return TemplateError(
            f"The model's chat template fails on this conversation{where}: {what}",
            hint="It may not know tools, or an order of roles such as this.",
            reason="broken",
            line=line,
        )

    def _line(self, error: BaseException) -> int:
        """The template's line that raised; 0: unknown."""
        line, at = 0, error.__traceback__
        while at is not None:
            if at.tb_frame.f_code.co_filename == _FILE and self._compiled is not None:
                line = self._compiled.get_corresponding_lineno(at.tb_lineno)
            at = at.tb_next
        return line


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _copies(field: str) -> tuple[str, ...]:
    """The names under which one message may carry `field`: templates read reasoning by several."""
    return _REASONING if field in _REASONING else (field,)


def _cannot_prolong(why: str) -> TemplateError:
    return TemplateError(
        f"This model cannot go on with the last message: {why}.",
        hint="Send it as a new question instead.",
        reason="input",
    )
