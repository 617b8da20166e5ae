"""Grammars and JSON schemas of requests, compiled by llguidance before a request is accepted.

A compilation is bounded by the size of what is asked, by llguidance's own limits, and by time. The same
grammar asked again is not compiled again. JSON is written on one line, with `, ` and `: ` between its parts as
Python and most chat templates write it, so that what a schema leaves no choice about is forced; a schema may
say otherwise (`x-guidance`).
"""

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from localchat.backend_api.interface import Tokenizer
from localchat.core.structured_output.json_schema import closed
from localchat.core.structured_output.length_guard import LengthGuard
from localchat.core.structured_output.matcher import GrammarMatcher, first_line
from localchat.engine.request import Grammar
from localchat.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MOST_BYTES = 256 * 1024
MOST_DEPTH = 64
COMPILE_S = 5.0
_LOOKS = 25
_KEPT = 32
_MASK_THREADS = 2
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NAMES = {
    "json_schema": "the JSON schema",
    "json_object": "the schema of any JSON object",
    "lark": "the grammar",
    "regex": "the regular expression",
}


class GrammarSpec(NamedTuple):
    """A grammar in llguidance's own form: a JSON list of grammars. `name`: what to call it in an error.
    `parts`: what it is made of, to name the part that is wrong."""

    source: str
    name: str
    parts: tuple["GrammarSpec", ...] = ()


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe; llguidance and the vocabulary's bytes are loaded with the
    first grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._lexicon: LLTokenizer | None = None
        self._endings: LengthGuard | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compilers = ThreadPoolExecutor(1, "grammar")
        self._workers = ThreadPoolExecutor(_MASK_THREADS, "mask")

    def grammar_matcher(
        self, whole: "GrammarSpec", *, room: int, ignore_ends: bool = False
    ) -> GrammarMatcher:
        """A fresh state of a grammar, for a text of `room` tokens at most. Raises UsageError saying what is
        wrong and where."""
        with self._lock:
            matcher = self._compiled.get(whole.source)
            if matcher is None:
                matcher = self._compile(whole)
                self._compiled[whole.source] = matcher
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(whole.source)
            own = matcher.deep_copy()
        tokenizer = self._tokenizer
        assert self._endings is not None
        return GrammarMatcher(
            own,
            tokenizer.vocab_size,
            tokenizer.eog,
            self._workers,
            self._endings,
            room=room,
            ignore_ends=ignore_ends,
        )

    def _compile(self, wanted: "GrammarSpec") -> "LLMatcher":
        matcher = self._built(wanted.source, wanted.name)
        if matcher.is_error():
            for part in wanted.parts:  # which of them it is, in its own lines and columns
                self._compile(part)
            raise UsageError(f"{wanted.name} cannot be used: {first_line(matcher.get_error())}")
        return matcher

    def _built(self, source: str, name: str) -> "LLMatcher":

        if self._lexicon is None:
            self._lexicon = lexicon(self._tokenizer)
            self._endings = LengthGuard(self._tokenizer)
        job = self._compilers.submit(_build, self._lexicon, source)
        try:
            return _patiently(job)
        except Late:
            # It goes on until llguidance's own limits end it; the next compilation gets another thread.
            self._compilers = ThreadPoolExecutor(1, "grammar")
            raise UsageError(
                f"{name} takes more than {COMPILE_S:g} s to compile",
                hint="make it smaller: fewer alternatives, smaller bounds, less nesting",
            ) from None


def _patiently(job: "Future[LLMatcher]") -> "LLMatcher":
    """The result within COMPILE_S. Counted in looks: a process that the system stopped loses one of them
    and not all its time. Raises Late."""
    for _ in range(_LOOKS - 1):
        with suppress(Late):
            return job.result(COMPILE_S / _LOOKS)
    return job.result(COMPILE_S / _LOOKS)


def _build(lexicon: "LLTokenizer", source: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(lexicon, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask takes longest, and shows a grammar that no text satisfies.
        matcher.compute_bitmask()
    return matcher


def wanted(grammar: Grammar) -> GrammarSpec:
    """A request's grammar alone."""
    return GrammarSpec(json.dumps({"grammars": [entry_of(grammar)]}), name_of(grammar))


def entry_of(grammar: Grammar) -> dict[str, Any]:
    """A request's grammar as one of the grammars that llguidance takes together, called `answer`. Raises
    UsageError naming what is wrong and where."""
    name = name_of(grammar)
    if len(grammar.source.encode("utf-8", "replace")) > MOST_BYTES:
        raise UsageError(
            f"{name} is {len(grammar.source):,} characters long; {MOST_BYTES:,} bytes are allowed"
        )
    match grammar.kind:
        case "json_object":
            return {"name": "answer", "json_schema": {"type": "object", "x-guidance": _STYLE}}
        case "json_schema":
            return {"name": "answer", "json_schema": styled(parse_schema(grammar.source, name))}
        case "lark":
            if not grammar.source.strip():
                raise UsageError(f"{name} is empty")
            return {"name": "answer", "lark_grammar": grammar.source}
        case "regex":
            from llguidance import regex_to_lark

            return {"name": "answer", "lark_grammar": f"start: /{regex_to_lark(grammar.source)}/"}


def name_of(grammar: Grammar) -> str:
    return _NAMES[grammar.kind]


def styled(schema: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """A schema with our way of writing JSON, where it does not state its own, and with its objects closed."""
    if schema is True:
        schema = {}
    said = schema.get("x-guidance")
    return {**closed(schema), "x-guidance": {**_STYLE, **(said if isinstance(said, dict) else {})}}


def parse_schema(text: str, name: str) -> dict[str, Any] | bool:
    """The schema that a JSON text holds. Raises UsageError with line and column, or the depth."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise UsageError(f"{name} nests deeper than {MOST_DEPTH} levels") from error
    except ValueError as error:
        raise UsageError(f"{name} is no JSON: {error}") from error
    if schema is False:
        raise UsageError(f"{name} is false: it allows no value")
    if not isinstance(schema, dict | bool):
        raise UsageError(
            f"{name} is a JSON {type(schema).__name__}; a schema is an object", hint=""
        )
    check_schema(schema, name)
    return schema


def check_schema(schema: Any, name: str) -> None:  # noqa: ANN401 - JSON
    """Raises UsageError where a schema nests too deep."""
    if _depth(schema, MOST_DEPTH) > MOST_DEPTH:
        raise UsageError(f"{name} nests deeper than {MOST_DEPTH} levels")


def _depth(value: Any, most: int) -> int:  # noqa: ANN401 - JSON
    """Levels of nesting, counted up to one more than `most`."""
    level, depth = [value], 0
    while level and depth <= most:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


# What llguidance must know of a vocabulary: the bytes of every token, and how text becomes tokens.
#
# Made once a model (0.5 s for 152k tokens), when the first grammar comes.


_SENTINEL = "\x02"
"""Put before a text, so that vocabularies that begin a text with a space put it before this."""


class _Words:
    """A Tokenizer in the shape that llguidance's TokenizerWrapper reads."""

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
        """Tokens whose bytes are exactly `text`; those of its bytes one by one where the vocabulary has no
        such tokens (it folds or drops something)."""
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        tokens = self._tokenizer.encode(_SENTINEL + words)
        begin = len(self._before)
        if tokens[:begin] == self._before:
            return tokens[begin:]
        return self._tokenizer.encode(words)


def lexicon(tokenizer: Tokenizer) -> "LLTokenizer":
    """The vocabulary for llguidance. Tokens that print nothing count as special: a grammar reaches them by
    number only, as `<[7]>`. Masks have one bit for each token of `tokenizer`."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Words(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog) or None,
    )
