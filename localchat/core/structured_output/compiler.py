"""Grammar compiler: the grammars and JSON schemas of requests, compiled by llguidance before acceptance.

A compilation is limited by the size of the grammar, by llguidance's own limits, and by time. Compiled grammars
are cached. JSON is written on one line with the separators `, ` and `: `, as Python and most chat templates
write it, so that tokens which a schema determines are forced. A schema can change that (`x-guidance`).
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from localchat.backend_api.interface import Tokenizer
from localchat.core.structured_output.endless_grammar import endless_rule
from localchat.core.structured_output.endless_schema import finite_schema
from localchat.core.structured_output.gbnf import lark_from_gbnf
from localchat.core.structured_output.json_schema import close_objects
from localchat.core.structured_output.length_guard import LengthGuard
from localchat.core.structured_output.matcher import GrammarMatcher, first_line
from localchat.core.structured_output.relaxation import (
    LENIENT,
    MAX_OPTIONAL,
    dropped_keywords,
    relax,
)
from localchat.engine.request import Grammar
from localchat.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
COMPILE_S = 5.0
_WAITS = 25
_CACHED_GRAMMARS = 32
_MASK_THREADS = 2
_MAX_ITEMS = 4 * MAX_OPTIONAL + 100
"""Limit of the parser's items at a position, of which an optional property needs four. Answers met llguidance's
own limit of 2,000."""
_MAX_FAULT = 500
"""Characters of llguidance's errors that are shown. It repeats the whole grammar."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_REGEX_FAULT = re.compile(r"regex parse error:\n.*\n {4}( *)\^+\nerror: (.*?)\n", re.DOTALL)
"""Error of a regular expression, within a message about the grammar made from it.

The carets stand below the part at fault, four columns to the right."""
_PANIC = "panic: "
"""Start of llguidance's error for more symbols than it can number."""
_NAMES = {
    "json_schema": "the JSON schema",
    "json_object": "the schema of any JSON object",
    "lark": "the grammar",
    "regex": "the regular expression",
}


class GrammarSpec(NamedTuple):
    """A grammar in llguidance's own form."""

    source: str
    """A JSON list of grammars."""
    name: str
    """Name in error messages."""
    parts: tuple["GrammarSpec", ...] = ()
    """Parts of the grammar, so that an error can name the invalid one."""
    field: str = ""
    """Field of the client's request. Empty: unknown."""
    dropped: tuple[str, ...] = ()
    """Keywords that were removed from the schema before compilation."""
    strict: bool = False
    """The request fails if a keyword of the schema is not enforced."""
    optional: bool = False
    """The answer is generated without the grammar if it cannot be compiled."""


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe.

    The first grammar loads llguidance and the bytes of the vocabulary (0.5 s for 152k tokens).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._llguidance_tokenizer: LLTokenizer | None = None
        self._length_guard = LengthGuard(tokenizer)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._workers = ThreadPoolExecutor(_MASK_THREADS, "mask")

    def grammar_matcher(
        self, spec: "GrammarSpec", *, room: int, ignore_ends: bool = False, min_tokens: int = 0
    ) -> GrammarMatcher:
        """Return a new matcher for a text of `min_tokens` to `room` tokens.

        Raises UsageError that names the fault and its position.
        """
        with self._lock:
            matcher = self._compiled.get(spec.source)
            if matcher is None:
                matcher = self._compile(spec)
                self._compiled[spec.source] = matcher
                if len(self._compiled) > _CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec.source)
            own = matcher.deep_copy()
        tokenizer = self._tokenizer
        return GrammarMatcher(
            own,
            tokenizer.vocab_size,
            tokenizer.eog,
            self._workers,
            self._length_guard,
            room=room,
            ignore_ends=ignore_ends,
            min_tokens=min_tokens,
        )

    def _compile(self, spec: "GrammarSpec") -> "LLMatcher":
        matcher = self._build_within_limit(spec)
        if matcher.is_error():
            for part in spec.parts:
                # The error of a part has that part's lines and columns.
                self._compile(part)
            why = first_line(matcher.get_error())
            if why.startswith(_PANIC):
                why = "it is too large"
            if spec.name.startswith(_NAMES["regex"]) and (fault := _REGEX_FAULT.search(why)):
                # On one line, because a message of the command line has no other.
                why = f"{fault[2]}, at position {len(fault[1])}"
            if len(why) > _MAX_FAULT:
                why = f"{why[:_MAX_FAULT]}…"
            raise UsageError(f"{spec.name} cannot be used: {why}", **_at(spec.field))
        return matcher

    def _build_within_limit(self, spec: "GrammarSpec") -> "LLMatcher":
        if self._llguidance_tokenizer is None:
            self._llguidance_tokenizer = llguidance_tokenizer(self._tokenizer)
        words = self._llguidance_tokenizer
        return within_limit(lambda: _build_matcher(words, spec.source), spec.name, spec.field)


def within_limit(work: Callable[[], T], name: str, field: str = "") -> T:
    """Do a part of a compilation within COMPILE_S. Raises UsageError if it takes longer.

    The work then continues on its thread until llguidance's own limits end it.
    """
    executor = ThreadPoolExecutor(1, "grammar")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    # Wait in parts, so that a process that the system suspends loses only one of them.
    for _ in range(_WAITS):
        with suppress(Timeout):
            return future.result(COMPILE_S / _WAITS)
    raise UsageError(
        f"{name} takes more than {COMPILE_S:g} s to compile",
        hint="make it smaller: fewer alternatives, smaller bounds, less nesting",
        **_at(field),
    )


def _build_matcher(llguidance_tokenizer: "LLTokenizer", source: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MAX_ITEMS)
    matcher = LLMatcher(llguidance_tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask takes longest, and reveals a grammar that no text satisfies.
        matcher.compute_bitmask()
    return matcher


@lru_cache(_CACHED_GRAMMARS)
def relaxed_keywords(spec: GrammarSpec) -> tuple[str, ...]:
    """Return the schema keywords that the grammar does not enforce. Raises UsageError in strict mode."""
    from llguidance import LLMatcher

    dropped: dict[str, None] = {}
    for part in spec.parts or (spec,):
        _, warnings = LLMatcher.validate_grammar_with_warnings(part.source)
        keywords = dict.fromkeys((*part.dropped, *dropped_keywords(warnings)))
        if part.strict and keywords:
            raise UsageError(
                f"{part.name} is strict, but these keywords cannot be enforced: {', '.join(keywords)}",
                hint="leave them out, or send strict: false to enforce the rest",
                **_at(part.field),
            )
        dropped.update(keywords)
    return tuple(dropped)


def grammar_spec(grammar: Grammar) -> GrammarSpec:
    """Return the spec of a request's grammar, named `answer`. Raises UsageError with the fault."""
    name = _NAMES[grammar.kind]
    if grammar.field:
        name = f"{name} in {grammar.field!r}"
    if len(grammar.source.encode("utf-8", "replace")) > MAX_BYTES:
        raise UsageError(
            f"{name} is too long: {len(grammar.source):,} characters; {MAX_BYTES:,} bytes are allowed",
            **_at(grammar.field),
        )
    dropped: tuple[str, ...] = ()
    match grammar.kind:
        case "json_object":
            entry: dict[str, Any] = {"json_schema": {"type": "object", "x-guidance": _STYLE}}
        case "json_schema":
            relaxed = relax(parse_schema(grammar.source, name), grammar.field)
            schema = with_ends(relaxed.schema, name, grammar.field)
            entry = {"json_schema": with_style(schema)}
            dropped = relaxed.dropped
        case "lark":
            entry = {"lark_grammar": _lark(grammar, name)}
        case "regex":
            from llguidance import regex_to_lark

            entry = {"lark_grammar": f"start: /{regex_to_lark(grammar.source)}/"}
    return GrammarSpec(
        entry_source(entry), name, field=grammar.field, dropped=dropped, strict=grammar.strict
    )


def entry_source(entry: Mapping[str, Any]) -> str:
    """Return the source of a GrammarSpec with one grammar."""
    return json.dumps({"grammars": [{"name": "answer", **entry}]})


def _lark(grammar: Grammar, name: str) -> str:
    """Return a grammar in Lark, whose rules all end. GBNF is converted."""
    if not grammar.source.strip():
        raise UsageError(f"{name} is empty", **_at(grammar.field))
    lark = grammar.source
    names: Mapping[str, str] = {}
    if _GBNF.search(lark):
        try:
            lark, names = lark_from_gbnf(lark)
        except ValueError as error:
            raise UsageError(
                f"{name} cannot be used: {error}",
                hint="it was read as GBNF because its rules use ::=; Lark rules use a colon",
                **_at(grammar.field),
            ) from error
    if rule := endless_rule(lark):
        raise UsageError(
            f"{name} cannot be used: the rule {names.get(rule, rule)!r} refers to itself without end",
            hint="give it an alternative without itself",
            **_at(grammar.field),
        )
    return lark


def _at(field: str) -> dict[str, str]:
    """Return the field of the client's request as details of an error, if known."""
    if not field:
        return {}
    return {"field": field}


def with_style(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a relaxed schema with closed objects and, unless it has its own, our JSON style."""
    style = {**_STYLE, **LENIENT}
    guidance = schema.get("x-guidance")
    if isinstance(guidance, dict):
        style |= guidance
    return {**close_objects(schema), "x-guidance": style}


def parse_schema(text: str, name: str) -> dict[str, Any]:
    """Parse a schema from JSON text. Raises UsageError with line and column, or with the depth."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise UsageError(f"{name} nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise UsageError(f"{name} is not valid JSON: {error}") from error
    if schema is False:
        raise UsageError(f"{name} is false, which allows no value")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UsageError(
            f"{name} is a JSON {type(schema).__name__}; a schema must be an object", hint=""
        )
    check_schema(schema, name)
    return schema


def check_schema(schema: Any, name: str) -> None:  # noqa: ANN401 - JSON
    """Raise UsageError if a schema nests too deeply."""
    if _depth(schema, MAX_DEPTH) > MAX_DEPTH:
        raise UsageError(f"{name} nests deeper than {MAX_DEPTH} levels")


def with_ends(schema: Mapping[str, Any], name: str, field: str) -> Mapping[str, Any]:
    """Return a relaxed schema without endless values. Raises UsageError if it allows no others."""
    finite = finite_schema(schema)
    if finite is None:
        raise UsageError(
            f"{name} refers to itself without end, so no answer satisfies it",
            hint="make the property that repeats optional, or let it be null",
            **_at(field),
        )
    return finite


def _depth(value: Any, limit: int) -> int:  # noqa: ANN401 - JSON
    """Return the levels of nesting, counted up to one more than `limit`."""
    level = [value]
    depth = 0
    while level and depth <= limit:
        depth += 1
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner.extend(outer.values())
            elif isinstance(outer, list):
                inner.extend(outer)
        level = inner
    return depth


_SENTINEL = "\x02"
"""Prefix for texts. A space that a vocabulary adds at the start comes before it."""


class _TokenizerAdapter:
    """Adapts a Tokenizer to the members that llguidance's TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(tokenizer.vocab_size):
            piece = tokenizer.piece(token)
            if not piece:
                piece = tokenizer.piece(token, special=True)
                self.special_token_ids.append(token)
            self.tokens.append(piece)
        self.eos_token_id = tokenizer.eos
        if tokenizer.eos < 0:
            self.eos_token_id = min(tokenizer.eog, default=0)
        self.bos_token_id = tokenizer.bos if tokenizer.bos >= 0 else None
        self._before = tokenizer.encode(_SENTINEL)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens whose bytes are exactly `text`.

        If the vocabulary has no such tokens, because it folds or drops characters, tokenize the plain text.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        tokens = self._tokenizer.encode(_SENTINEL + text)
        begin = len(self._before)
        if tokens[:begin] == self._before:
            return tokens[begin:]
        return self._tokenizer.encode(text)


def llguidance_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """Return llguidance's tokenizer for a vocabulary. Its masks have one bit for each token.

    Tokens without text count as special. A grammar can name them only by number, as in `<[7]>`.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_TokenizerAdapter(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog) or None,
    )
