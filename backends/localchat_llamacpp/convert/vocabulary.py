"""Converts the tokenizer of a checkpoint to the metadata of a GGUF file.

It reads tokenizer.json, tokenizer_config.json and the chat template. Two kinds are supported: byte-level BPE,
and the BPE of SentencePiece vocabularies, whose merges become scores.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from localchat.model_files.chat_templates import DEFAULT, chat_templates
from localchat.model_files.checkpoint import optional_object, read_object
from localchat.model_files.pre_tokenizers import GPT2, LONE_DIGITS, PATTERNS, WHOLE_WORDS
from localchat_llamacpp.convert.tensor_files import unsupported
from localchat_llamacpp.gguf_writer import entry

_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_BYTE: Final = 6
_SPACE: Final = "\u2581"
"""Space in the tokens of SentencePiece."""
_LIKE_CONTROL: Final = re.compile(
    r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL
)
"""Added tokens that checkpoints forget to mark as special. llama.cpp's converter has the same list."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_LAST_SCORE: Final = -1e4
"""Score of tokens that no merge makes."""
_SPECIAL: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in tokenizer_config.json, and in keys of GGUF."""


class _Vocabulary(NamedTuple):
    """Tokens by id."""

    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]


def vocabulary_entries(folder: Path, rows: int) -> Iterator[bytes]:
    """Yield the metadata of a checkpoint's tokenizer. rows: rows of the embedding, at least one per token.

    Raises ModelMissing, ModelInvalid.
    """
    raw = read_object(folder / "tokenizer.json")
    settings = optional_object(folder / "tokenizer_config.json")
    model = raw.get("model") or {}
    if model.get("type") not in ("BPE", None) or not isinstance(model.get("vocab"), dict):
        raise unsupported(folder, f"its tokenizer is of the type {model.get('type')}, not BPE")
    vocabulary = _vocabulary(folder, raw, rows)
    is_sentencepiece = bool(model.get("byte_fallback"))
    kind = "gpt2"
    pre = "default"
    if is_sentencepiece:
        kind = "llama"
    else:
        pre = _pre_tokenizer(folder, raw)
    yield entry("tokenizer.ggml.model", kind)
    yield entry("tokenizer.ggml.pre", pre)
    yield entry("tokenizer.ggml.tokens", vocabulary.tokens)
    merges = list(map(_pair, model["merges"]))
    if is_sentencepiece:
        yield entry("tokenizer.ggml.scores", _scores(vocabulary, merges))
        yield entry("tokenizer.ggml.add_space_prefix", _marks_first_word(raw))
    yield entry("tokenizer.ggml.token_type", vocabulary.types)
    if merges and not is_sentencepiece:
        yield entry("tokenizer.ggml.merges", [" ".join(pair) for pair in merges])
    yield from _special_entries(folder, raw, settings, vocabulary.ids)
    for name, template in chat_templates(folder).items():
        suffix = f".{name}".removesuffix(f".{DEFAULT}")
        yield entry(f"tokenizer.chat_template{suffix}", template)


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    """Return the two tokens of a merge. Older files separate them by a space."""
    if isinstance(merge, str):
        return merge.split(" ", 1)
    return merge


def _vocabulary(folder: Path, raw: Mapping[str, Any], rows: int) -> _Vocabulary:
    """Return the tokens of all rows. Rows without a token are unused."""
    model = raw["model"]
    ids: dict[str, int] = dict(model["vocab"])
    by_id = {number: text for text, number in ids.items()}
    types = {}
    if model.get("byte_fallback"):
        types = {number: _BYTE for text, number in ids.items() if _BYTE_TOKEN.fullmatch(text)}
        types[ids.get(model.get("unk_token") or "", -1)] = _UNKNOWN
    for token in raw.get("added_tokens") or ():
        text = token["content"]
        number = token["id"]
        ids[text] = number
        kind = _CONTROL
        if not token.get("special") and not _LIKE_CONTROL.fullmatch(text):
            kind = _USER_DEFINED
            # llama.cpp finds these tokens in the text before it marks spaces.
            text = text.replace(_SPACE, " ")
        by_id[number] = text
        if types.get(number) != _UNKNOWN:
            types[number] = kind
    if max(by_id, default=0) >= rows:
        raise unsupported(
            folder,
            f"it has tokens up to number {max(by_id):,}, and its embedding has {rows:,} rows",
        )
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [types.get(number, _NORMAL) for number in range(rows)]
    for number in set(range(rows)) - by_id.keys():
        kinds[number] = _UNUSED
    return _Vocabulary(tokens, kinds, ids)


def _pre_tokenizer(folder: Path, raw: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the steps that split a text before merging. Raises ModelInvalid."""
    normalizer = raw.get("normalizer")
    if normalizer and normalizer.get("type") != "NFC":
        raise unsupported(
            folder, f"its normalizer {normalizer.get('type')} has no name in llama.cpp"
        )
    splitter = raw.get("pre_tokenizer") or {}
    lone_digits = False
    pattern = ""
    for step in splitter.get("pretokenizers") or [splitter]:
        match step:
            case {"type": "Digits", "individual_digits": True} if not pattern:
                lone_digits = True
            case {"type": "Split", "pattern": {"Regex": str(regex)}} if not pattern:
                pattern = regex
            case {"type": "ByteLevel"} if not step.get("add_prefix_space"):
                # Without a split before it, this step has the pattern of GPT-2.
                if step.get("use_regex", True) and not pattern:
                    pattern = GPT2
            case _:
                raise unsupported(folder, f"its pre-tokenizer has the step {str(step)[:200]}")
    whole_words = bool(raw["model"].get("ignore_merges"))
    for name, regex in PATTERNS.items():
        if (regex, name in LONE_DIGITS, name in WHOLE_WORDS) == (pattern, lone_digits, whole_words):
            return name
    raise unsupported(
        folder, f"its pre-tokenizer splits by {pattern[:200]!r}, which has no name here"
    )


def _scores(vocabulary: _Vocabulary, merges: Sequence[Sequence[str]]) -> list[float]:
    """Return the scores that make the same merges in the same order: the earlier a merge, the higher."""
    scores: dict[str, float] = {}
    for index, pair in enumerate(merges):
        scores.setdefault("".join(pair), -float(index))
    return [scores.get(token, _LAST_SCORE - len(merges)) for token in vocabulary.tokens]


def _marks_first_word(raw: Mapping[str, Any]) -> bool:
    """Return whether a text begins with the mark of a space."""
    normalizer = raw.get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    splitter = raw.get("pre_tokenizer") or {}
    if splitter.get("type") == "Metaspace":
        return bool(splitter.get("prepend_scheme", "always") != "never")
    return any(step.get("type") == "Prepend" for step in steps)


def _special_entries(
    folder: Path, raw: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, int]
) -> Iterator[bytes]:
    config = optional_object(folder / "config.json")
    numbers: dict[str, int] = {}
    for name, key in _SPECIAL.items():
        token = settings.get(f"{name}_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        number = ids.get(token or "", config.get(f"{name}_token_id"))
        if isinstance(number, list) and number:
            number = number[0]
        if isinstance(number, int) and number >= 0:
            numbers[name] = number
            yield entry(f"tokenizer.ggml.{key}_token_id", number)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = numbers.get("bos") in _first_tokens(raw, ids)
    yield entry("tokenizer.ggml.add_bos_token", bool(add_bos))
    yield entry("tokenizer.ggml.add_eos_token", bool(settings.get("add_eos_token")))


def _first_tokens(raw: Mapping[str, Any], ids: Mapping[str, int]) -> set[int | None]:
    """Return the token that the post-processor puts before every text."""
    processor = raw.get("post_processor") or {}
    for step in processor.get("processors") or [processor]:
        match step:
            case {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": str(text)}}, *_],
            }:
                return {ids.get(text, -1)}
    return set()
