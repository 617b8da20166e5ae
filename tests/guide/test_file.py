"""The shipped file: small enough, complete inside, tokenized as llama.cpp does, and it answers."""

import json
from itertools import islice
from random import Random
from typing import Any

import checkpoint
import gguf
import pytest
from conversations import conversations
from facts import build
from llama_text import LlamaText
from tokenizers import Tokenizer
from tokens import SPECIAL, TEMPLATE, encode

ODD = " \n\t\r abXY019.,;:!?'\"`~@#$%^&*()[]{}<>|/\\-_=+éßλЖ中文あ한🙂👩‍👧 ’“”…€\u00a0\u200b\u0301"


@pytest.fixture(scope="module")
def guide() -> LlamaText:
    return LlamaText(checkpoint.GUIDE, threads=1)


@pytest.fixture(scope="module")
def coder() -> Tokenizer:
    _, tokenizer = checkpoint.read_gguf(checkpoint.GUIDE)
    return Tokenizer.from_str(json.dumps(tokenizer))


def field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def test_the_file_fits_the_wheel_and_says_what_it_is() -> None:
    assert checkpoint.GUIDE.stat().st_size <= 16 * 2**20
    reader = gguf.GGUFReader(checkpoint.GUIDE)
    assert field(reader, "general.name") == "localchat guide"
    assert field(reader, "general.license") == "apache-2.0"
    assert field(reader, "tokenizer.ggml.pre") == "qwen2"
    assert field(reader, "tokenizer.chat_template") == TEMPLATE
    assert field(reader, "qwen2.context_length") == 4096
    assert len(field(reader, "tokenizer.ggml.tokens")) == 4608
    for name in ("qwen2.embedding_length", "qwen2.feed_forward_length"):
        assert field(reader, name) % 128 == 0


def test_tokens_are_those_of_llama_cpp(guide: LlamaText, coder: Tokenizer) -> None:
    rng = Random(1)
    texts = ["".join(rng.choices(ODD, k=rng.randint(0, 50))) for _ in range(400)]
    texts += [text for _, talk in islice(conversations(build(), 12), 200) for _, text in talk]
    for text in texts:
        assert coder.encode(text, add_special_tokens=False).ids == guide.tokens(
            text, special=False
        ), text


def test_training_saw_a_conversation_as_the_template_writes_it(
    guide: LlamaText, coder: Tokenizer
) -> None:
    talks = [talk for kind, talk in islice(conversations(build(), 13), 100) if kind != "infill"]
    for talk, (ids, own) in zip(talks, encode(coder, talks), strict=True):
        shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in talk)
        assert ids[:-1] == guide.tokens(shown, special=True)
        said = guide.text([i for i, o in zip(ids, own, strict=True) if o])
        assert said == "".join(text for role, text in talk if role == "assistant")


def test_special_tokens_are_single_and_first(guide: LlamaText) -> None:
    assert [guide.tokens(t, special=True) for t in SPECIAL] == [[i] for i in range(len(SPECIAL))]


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("how do I pull a model?", "localchat pull"),
        ("what does exit code 6 mean?", "context"),
        ("what is the capital of Portugal?", "do not know"),
    ],
)
def test_it_answers_and_ends_by_itself(guide: LlamaText, question: str, fact: str) -> None:
    answer, ended = guide.answer([("user", question)], 200)
    assert fact in answer
    assert ended
