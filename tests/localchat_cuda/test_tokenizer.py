import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.chat_templates import chat_templates
from localchat_cuda.tokenizer import CheckpointTokenizer, sampling_defaults

TEXT = ["the quick brown fox jumps over the lazy dog, again and again", "naïve café — 12 + 30 = 42"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary as Qwen's and Llama 3's are."""
    path = tmp_path_factory.mktemp("vocabulary")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    names = ["<|begin|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>"]
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.add_tokens([AddedToken("<tool_call>", special=False)])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<|begin|>"},
                "eos_token": "<|im_end|>",
                "add_bos_token": True,
                "chat_template": [{"name": "default", "template": "{{ messages }}"}],
            }
        )
    )
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    return path


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer(folder, 500)


@given(text=st.text(max_size=30))
def test_pieces_make_up_the_text(vocabulary: CheckpointTokenizer, text: str) -> None:
    tokens = vocabulary.encode(text)
    data = b"".join(vocabulary.piece(token) for token in tokens)
    assert data == text.encode()
    assert len(tokens) * vocabulary.longest_piece >= len(data)


def test_lone_surrogates_are_replaced(vocabulary: CheckpointTokenizer) -> None:
    tokens = vocabulary.encode("a\ud800b\x00")
    assert b"".join(map(vocabulary.piece, tokens)) == "a\ufffdb\x00".encode()


def test_control_tokens_are_text_unless_they_are_asked_for(vocabulary: CheckpointTokenizer) -> None:
    plain = vocabulary.encode("hi<|im_end|>")
    assert vocabulary.eos not in plain
    assert b"".join(map(vocabulary.piece, plain)) == b"hi<|im_end|>"
    marked = vocabulary.encode("hi<|im_end|>", special=True)
    assert marked[-1] == vocabulary.eos
    assert vocabulary.piece(vocabulary.eos) == b""
    assert vocabulary.piece(vocabulary.eos, special=True) == b"<|im_end|>"
    tool = vocabulary.encode("<tool_call>")
    assert len(tool) == 1 and vocabulary.piece(tool[0]) == b"<tool_call>"


def test_begin_and_ends_are_the_checkpoints(vocabulary: CheckpointTokenizer) -> None:
    assert vocabulary.encode("a", add_bos=True)[0] == vocabulary.bos >= 0
    named = {vocabulary.encode(t, special=True)[0] for t in ("<|im_end|>", "<|endoftext|>")}
    assert vocabulary.eog == named | {3}
    assert vocabulary.special("fim_pre") == vocabulary.encode("<|fim_prefix|>", special=True)[0]
    assert vocabulary.special("fim_sep") == -1
    assert vocabulary.special("sep") == -1


def test_rows_beyond_the_last_token_are_empty_and_beyond_the_model_refused(
    vocabulary: CheckpointTokenizer,
) -> None:
    assert vocabulary.vocab_size == 500
    assert vocabulary.piece(499) == b""
    with pytest.raises(ValueError, match="outside the vocabulary"):
        vocabulary.piece(500)


def test_added_tokens_without_a_row_of_the_model_are_letters(folder: Path) -> None:
    whole = CheckpointTokenizer(folder)
    rows = whole.vocab_size - 1
    (last,) = whole.encode("<tool_call>")
    assert last == rows
    found = CheckpointTokenizer(folder, rows)
    tokens = found.encode("a<tool_call><|im_end|>", special=True)
    assert found.vocab_size == rows > max(tokens)
    assert b"".join(found.piece(token, special=True) for token in tokens).startswith(b"a<tool")
    assert tokens[-1] == found.eos == whole.eos


def test_a_token_without_a_row_may_stand_in_both_lists(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<image>": 2}, merges=[]))
    made.add_special_tokens([AddedToken("<image>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    assert CheckpointTokenizer(tmp_path).encode("a<image>b", special=True) == [0, 2, 1]
    assert CheckpointTokenizer(tmp_path, 2).encode("a<image>b", special=True)[0] == 0
    assert CheckpointTokenizer(tmp_path, 2).vocab_size == 2


def test_a_special_token_that_is_a_lone_surrogate_is_unknown(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    assert CheckpointTokenizer(tmp_path, 500).eos == -1


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ModelInvalid, match="states 100"):
        CheckpointTokenizer(folder, 100)


def test_bytes_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "\u2581a": 3, "b": 4}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    found = CheckpointTokenizer(tmp_path)
    assert [found.piece(token) for token in (1, 2, 3, 4)] == [b"\xc3", b"\xa9", b" a", b"b"]
    assert (found.bos, found.add_bos, found.eog) == (-1, False, frozenset())


@pytest.mark.parametrize("name", ["<end_of_turn>", "<|end|>", "<|im_end|>"])
def test_end_of_turn_tokens_end_a_generation_whatever_other_files_state(
    tmp_path: Path, name: str
) -> None:
    """As of Gemma, Phi-4-mini and Phi-4; and spaces that are written as another letter, as Gemma does."""
    vocab = {"<unk>": 0, "\u2581": 1, "\u2581\u2581\u2581": 2} | {
        f"<0x{byte:02X}>": byte + 3 for byte in range(256)
    }
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<bos>", "<eos>", name)])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 260]}))
    found = CheckpointTokenizer(tmp_path)
    turn = found.encode(name, special=True)[0]
    assert found.eog == {found.eos, turn, 1, 260}
    assert found.special("eot") == turn
    assert found.longest_piece == max(len(name), 6)
    text = "naïve  text\n"
    data = b"".join(found.piece(token) for token in found.encode(text))
    assert data == text.encode()


def test_template_and_sampling_come_from_separate_files(folder: Path, tmp_path: Path) -> None:
    assert chat_templates(folder) == {"default": "{{ messages }}"}
    assert sampling_defaults(folder) == (("temperature", 0.6), ("top_k", 20.0))
    assert chat_templates(tmp_path) == {}
    assert sampling_defaults(tmp_path) == ()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ y }}"}))
    assert chat_templates(tmp_path) == {"default": "{{ y }}"}
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    assert chat_templates(tmp_path) == {"default": "{{ x }}"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"tokenizer\.json"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        CheckpointTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("generation_config.json", b"[1]"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_next_to_the_weights_is_named(
    name: str, data: bytes, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(data)
    read = chat_templates if name.endswith("jinja") else CheckpointTokenizer
    with pytest.raises(ModelInvalid, match=re.escape(name)) as caught:
        read(tmp_path)
    assert "download it again" in caught.value.hint
