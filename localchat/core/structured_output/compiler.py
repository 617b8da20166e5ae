"""Grammar compiler: the grammars and JSON schemas of requests, compiled by llguidance before acceptance.

A compilation is bounded by the size of the grammar, by llguidance's own limits, and by time. Compiled
grammars are cached. JSON is written on one line, with `, ` and `: ` between its parts as Python and most
chat templates write it, so that tokens about which a schema leaves no choice are forced; a schema may say
otherwise (`x-guidance`).
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from localchat.backend_api.interface import Tokenizer
from localchat.core.structured_output.json_schema import close_objects
from localchat.core.structured_output.length_guard import LengthGuard
from localchat.core.structured_output.matcher import GrammarMatcher, first_line
from localchat.core.structured_output.relaxation import LENIENT, dropped_keywords, relax
from localchat.engine.request import Grammar
from localchat.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MOST_BYTES = 256 * 1024
MOST_DEPTH = 64
COMPILE_S = 5.0
_WAITS = 25
_CACHED_GRAMMARS = 32
_MASK_THREADS = 2
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_REGEX_FAULT = re.compile(r"regex parse error:\n(.*?)\nerror: (.*?)\n", re.DOTALL)
"""The fault of an expression, in a message about the grammar that was made of it."""
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
    """How an error calls it."""
    parts: tuple["GrammarSpec", ...] = ()
    """Its parts, so that an error can name the one that is wrong."""
    field: str = ""
    """Where it stands in the client's request; empty: not known."""
    dropped: tuple[str, ...] = ()
    """Keywords that were left out of its schema before llguidance saw it."""
    strict: bool = False
    """The request fails if a keyword of the schema is not enforced."""


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe.

    The first grammar loads llguidance and the bytes of the vocabulary (0.5 s for 152k tokens).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._llguidance_tokenizer: LLTokenizer | None = None
        self._length_guard: LengthGuard | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compilers = ThreadPoolExecutor(1, "grammar")
        self._workers = ThreadPoolExecutor(_MASK_THREADS, "mask")

    def grammar_matcher(
        self, spec: "GrammarSpec", *, room: int, ignore_ends: bool = False, min_tokens: int = 0
    ) -> GrammarMatcher:
        """Make a fresh matcher, for a text of `min_tokens` to `room` tokens. Raises UsageError with fault and
        place."""
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
        assert self._length_guard is not None
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
            for part in spec.parts:  # finds the faulty part, in its own lines and columns
                self._compile(part)
            why = first_line(matcher.get_error())
            if spec.name.startswith(_NAMES["regex"]) and (fault := _REGEX_FAULT.search(why)):
                why = f"{fault[2]}\n{fault[1]}"
            raise UsageError(f"{spec.name} cannot be used: {why}", **_at(spec.field))
        return matcher

    def _build_within_limit(self, spec: "GrammarSpec") -> "LLMatcher":
        if self._llguidance_tokenizer is None:
            self._llguidance_tokenizer = llguidance_tokenizer(self._tokenizer)
            self._length_guard = LengthGuard(self._tokenizer)
        future = self._compilers.submit(_build_matcher, self._llguidance_tokenizer, spec.source)
        try:
            return _wait(future)
        except Timeout:
            # It goes on until llguidance's own limits end it; the next compilation gets another thread.
            self._compilers = ThreadPoolExecutor(1, "grammar")
            raise UsageError(
                f"{spec.name} takes more than {COMPILE_S:g} s to compile",
                hint="make it smaller: fewer alternatives, smaller bounds, less nesting",
                **_at(spec.field),
            ) from None


def _wait(future: "Future[LLMatcher]") -> "LLMatcher":
    """Wait for a compilation at most COMPILE_S. Raises Timeout.

    The time is waited in parts: a process that the system suspended loses one of them and not all its time.
    """
    for _ in range(_WAITS - 1):
        with suppress(Timeout):
            return future.result(COMPILE_S / _WAITS)
    return future.result(COMPILE_S / _WAITS)


def _build_matcher(llguidance_tokenizer: "LLTokenizer", source: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(llguidance_tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask takes longest, and shows a grammar that no text satisfies.
        matcher.compute_bitmask()
    return matcher


@lru_cache(_CACHED_GRAMMARS)
def relaxed_keywords(spec: GrammarSpec) -> tuple[str, ...]:
    """Keywords of the schemas that the compiled grammar does not hold. Raises UsageError if one is strict."""
    from llguidance import LLMatcher

    dropped: dict[str, None] = {}
    for part in spec.parts or (spec,):
        _, warnings = LLMatcher.validate_grammar_with_warnings(part.source)
        keywords = dict.fromkeys((*part.dropped, *dropped_keywords(warnings)))
        if part.strict and keywords:
            raise UsageError(
                f"{part.name} is strict, and these of its keywords cannot be enforced: {', '.join(keywords)}",
                hint="leave them out, or send strict: false to enforce the rest",
                **_at(part.field),
            )
        dropped.update(keywords)
    return tuple(dropped)


def grammar_spec(grammar: Grammar) -> GrammarSpec:
    """A request's grammar alone, named `answer`. Raises UsageError with fault and place."""
    name = _NAMES[grammar.kind] + (f" in {grammar.field!r}" if grammar.field else "")
    if len(grammar.source.encode("utf-8", "replace")) > MOST_BYTES:
        raise UsageError(
            f"{name} is too long: {len(grammar.source):,} characters; {MOST_BYTES:,} bytes are allowed",
            **_at(grammar.field),
        )
    dropped: tuple[str, ...] = ()
    match grammar.kind:
        case "json_object":
            entry: dict[str, Any] = {"json_schema": {"type": "object", "x-guidance": _STYLE}}
        case "json_schema":
            relaxed = relax(parse_schema(grammar.source, name), grammar.field)
            entry = {"json_schema": with_style(relaxed.schema)}
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
    """One grammar as the source of a GrammarSpec."""
    return json.dumps({"grammars": [{"name": "answer", **entry}]})


def _lark(grammar: Grammar, name: str) -> str:
    """A grammar in Lark; one in GBNF is converted."""
    if not grammar.source.strip():
        raise UsageError(f"{name} is empty", **_at(grammar.field))
    if not _GBNF.search(grammar.source):
        return grammar.source
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(grammar.source)
    except GbnfToLarkError as error:
        raise UsageError(
            f"{name} cannot be used: {error}",
            hint="it was read as GBNF, because its rules have ::=; rules in Lark have a colon",
            **_at(grammar.field),
        ) from error


def _at(field: str) -> dict[str, str]:
    """The place of a fault in the client's request, where it is known, as details of an error."""
    return {"field": field} if field else {}


def with_style(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A relaxed schema with closed objects, and with our JSON style where it does not state its own."""
    guidance = schema.get("x-guidance")
    return {
        **close_objects(schema),
        "x-guidance": {**_STYLE, **LENIENT, **(guidance if isinstance(guidance, dict) else {})},
    }


def parse_schema(text: str, name: str) -> dict[str, Any]:
    """Parse a schema from JSON text. Raises UsageError with line and column, or the depth."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise UsageError(f"{name} nests deeper than {MOST_DEPTH} levels") from error
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
    """Raise UsageError where a schema nests too deep."""
    if _depth(schema, MOST_DEPTH) > MOST_DEPTH:
        raise UsageError(f"{name} nests deeper than {MOST_DEPTH} levels")


def _depth(value: Any, most: int) -> int:  # noqa: ANN401 - JSON
    """Levels of nesting, counted up to one more than `most`."""
    level = [value]
    depth = 0
    while level and depth <= most:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


_SENTINEL = "\x02"
"""Prepended to a text, so that vocabularies that begin a text with a space put it before this."""


class _TokenizerAdapter:
    """A Tokenizer with the members that llguidance's TokenizerWrapper reads."""

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
        self.eos_token_id = tokenizer.eos if tokenizer.eos >= 0 else min(tokenizer.eog, default=0)
        self.bos_token_id = tokenizer.bos if tokenizer.bos >= 0 else None
        self._before = tokenizer.encode(_SENTINEL)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly `text`.

        Where the vocabulary has no such tokens (it folds or drops something), those of the plain text.
        """
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        tokens = self._tokenizer.encode(_SENTINEL + words)
        begin = len(self._before)
        if tokens[:begin] == self._before:
            return tokens[begin:]
        return self._tokenizer.encode(words)


def llguidance_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """Make llguidance's tokenizer for a vocabulary. Its masks have one bit for each token.

    Tokens that print nothing count as special: a grammar reaches them by number only, as `<[7]>`.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_TokenizerAdapter(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog) or None,
    )
