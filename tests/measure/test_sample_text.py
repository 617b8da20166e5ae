"""Prompts of a benchmark are natural text, or the user's own."""

from itertools import pairwise
from pathlib import Path

import pytest

from localchat.errors import UsageError
from localchat.measure.workload import (
    SHAPES,
    TokenScale,
    messages,
    prompt_shape,
    prose,
    sample_sentences,
    sample_text,
)


def test_prose_has_its_length_and_shares_no_prefix() -> None:
    texts = [prose(300, seed) for seed in range(20)]
    assert all(len(text.split()) == 300 for text in texts)
    assert len({text[:6] for text in texts}) == 20
    sentences = sample_sentences()
    assert any(f"{sentence} {following}" in texts[0] for sentence, following in pairwise(sentences))
    assert prose(300, 7) == texts[7]
    assert len(prose(9000, 1).split()) == 9000


def test_the_sample_has_prose_code_and_another_language() -> None:
    text = sample_text()
    assert 55_000 < len(text.encode()) < 70_000
    assert "def " in text and " und " in text and len(sample_sentences()) > 100


def test_a_prompt_ends_with_a_task() -> None:
    contents = [
        messages(SHAPES["chat"], TokenScale(), f"{seed}", "run")[0]["content"] for seed in range(20)
    ]
    content = contents[0]
    assert content.endswith(("?", "."))
    assert len({content.rpartition("\n\n")[2] for content in contents}) > 3


def test_prompts_of_a_file_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "Hello"}\n\n{"messages": [{"role": "user", "content": "Why?"}]}\n'
        '{"custom_id": "1", "body": {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 9}}\n'
    )
    shape = prompt_shape(path)
    sent = {messages(shape, TokenScale(), str(seed), "run")[0]["content"] for seed in range(50)}
    assert sent == {"Hello", "Why?", "How?"}
    assert (shape.name, shape.output_tokens) == ("p.jsonl", 9)


@pytest.mark.parametrize("line", ["{", '{"prompt": ""}', "{}", '{"messages": []}', ""])
def test_a_file_without_usable_prompts_is_a_usage_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"--prompts .*p\.jsonl"):
        prompt_shape(path)
