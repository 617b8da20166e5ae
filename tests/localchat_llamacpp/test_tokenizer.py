"""Text to tokens and back, from any thread, for any str."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.model_files.gguf import Array
from localchat_llamacpp.native_model import load_vocabulary
from localchat_llamacpp.tokenizer import LlamaTokenizer
from tests.support import gguf_files
from tests.support.llamacpp_models import BEGIN, CONTROL, END, VOCAB, vocabulary


@pytest.fixture(scope="module")
def words(models: dict[str, Path]) -> Iterator[LlamaTokenizer]:
    found = LlamaTokenizer(*load_vocabulary(models["llama"]))
    yield found
    found.close()


def test_it_says_what_the_file_says(words: LlamaTokenizer) -> None:
    assert (words.vocab_size, words.bos, words.eos) == (VOCAB, BEGIN, END)
    assert words.add_bos is True
    assert words.eog == {END}


def test_what_the_library_tells_is_what_a_walk_over_all_tokens_finds(
    models: dict[str, Path],
) -> None:
    told = LlamaTokenizer(*load_vocabulary(models["llama"]))
    walked = LlamaTokenizer(load_vocabulary(models["llama"])[0])
    assert told.eog == walked.eog == {END}
    assert told.longest_piece == walked.longest_piece == len(CONTROL[2])
    told.close()
    walked.close()


def test_merges_make_long_tokens(words: LlamaTokenizer) -> None:
    ids = words.encode("hello world")
    assert [words.piece(i) for i in ids] == [b"hello", b" world"]


def test_control_tokens_are_recognised_only_where_asked(words: LlamaTokenizer) -> None:
    assert words.encode("<|im_end|>", special=True) == [END]
    assert END not in words.encode("<|im_end|>")
    assert words.piece(END) == b""
    assert words.piece(END, special=True) == b"<|im_end|>"


def test_the_begin_token_is_added_where_asked_and_only_if_the_model_wants_it(
    words: LlamaTokenizer,
) -> None:
    assert words.encode("a", add_bos=True)[0] == BEGIN
    assert words.encode("", add_bos=True) == [BEGIN]
    assert words.encode("") == []


def test_special_tokens_have_names(words: LlamaTokenizer) -> None:
    assert words.special("fim_pre") == vocabulary().index(CONTROL[2])
    assert words.special("fim_suf") == -1
    assert words.special("nonsense") == -1


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_token_out_of_range_is_an_error_and_no_crash(words: LlamaTokenizer, token: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        words.piece(token)


# "\r\n", "é", NUL, a lone surrogate, an astral letter: whatever hypothesis likes.
@given(text=st.text(st.characters(exclude_categories=())))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_round_trip(words: LlamaTokenizer, text: str) -> None:
    back = b"".join(words.piece(i) for i in words.encode(text))
    clean = "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)
    assert back == clean.encode()


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_longest_piece_bounds_the_number_of_tokens(words: LlamaTokenizer, text: str) -> None:
    assert len(words.encode(text, special=True)) * words.longest_piece >= len(text.encode())


def test_threads_get_the_same_answers(words: LlamaTokenizer) -> None:
    text = "hello world, über alles " * 50
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: words.encode(text), range(40)))
    assert all(answer == answers[0] for answer in answers)


def test_a_closed_vocabulary_refuses(models: dict[str, Path]) -> None:
    words = LlamaTokenizer(*load_vocabulary(models["llama"]))
    words.close()
    words.close()
    with pytest.raises(ValueError, match="closed"):
        words.encode("a")


@pytest.mark.parametrize(("kind", "recognized"), [(1, []), (4, [True])])
def test_an_html_tag_that_llamacpp_takes_for_an_end_is_text(
    tmp_path: Path, kind: int, recognized: list[bool]
) -> None:
    metadata: dict[str, Any] = dict(gguf_files.llama(gguf_files.Size()).metadata)
    names = [*metadata["tokenizer.ggml.tokens"]]
    kinds = [*metadata["tokenizer.ggml.token_type"]]
    tag, turn = 310, 311
    names[tag], names[turn] = "</s>", "<|eot_id|>"
    kinds[tag] = kinds[turn] = kind
    metadata |= {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    path = gguf_files.Gguf(metadata).write(tmp_path / "words.gguf")
    words = LlamaTokenizer(*load_vocabulary(path), metadata=_header_values(metadata))
    assert tag not in words.eog and turn in words.eog
    assert words.piece(tag) == b"</s>"
    text = "a</s> b<|im_end|> c</s>"
    for special in (False, True):
        ids = words.encode(text, special=special)
        assert ids.count(tag) == 2 * len(recognized)
        assert ids.count(words.eos) == special
        assert b"".join(words.piece(i, special=True) for i in ids).decode() == text
    known = {token.text: token.control for token in words.special_tokens}
    assert known.get("</s>") == (False if recognized else None)
    words.close()


def _header_values(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as a header has it."""
    return {
        key: Array(len(value), tuple(value)) if isinstance(value, list) else value
        for key, value in metadata.items()
    }


def test_decomposed_letters_are_composed_where_the_model_s_own_tokenizer_does_so(
    tmp_path: Path,
) -> None:
    metadata = dict(gguf_files.llama(gguf_files.Size()).metadata)
    composed, decomposed = "Köln <|im_end|>é", "Ko\u0308ln <|im_end|>e\u0301"
    for pre, equal in (("default", False), ("qwen2", True)):
        metadata["tokenizer.ggml.pre"] = pre
        path = gguf_files.Gguf(metadata).write(tmp_path / "words.gguf")
        words = LlamaTokenizer(*load_vocabulary(path), metadata=_header_values(metadata))
        for special in (False, True):
            ids = words.encode(decomposed, special=special)
            assert (ids == words.encode(composed, special=special)) == equal
            assert (words.eos in ids) == special
        mark = "<|im_end|>\u0338"
        assert words.encode(mark, special=True)[0] == words.eos
        words.close()
