"""The splitter of reasoning and answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localchat.chat_format.parser import Answer, Part, Thought
from localchat.chat_format.reasoning_parser import (
    REASONING_FAMILIES,
    THINK,
    ReasoningFamily,
    ReasoningParser,
)


def split(
    text: str, family: ReasoningFamily = THINK, *, opened: bool = False, by: int = 1
) -> tuple[str, str]:
    """(thought, said), fed in pieces of `by` characters."""
    answer_parser = ReasoningParser(family, opened=opened)
    parts: list[Part] = []
    for at in range(0, len(text), by):
        parts += answer_parser.feed(text[at : at + by])
    parts += answer_parser.finish()
    assert all(isinstance(part, Thought | Answer) and part.text for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part.text for part in parts if isinstance(part, Answer)),
    )


@pytest.mark.parametrize("by", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        ("plain  answer\n", False, "", "plain  answer\n"),
        ("  indented", False, "", "  indented"),
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("why\n</think>\n\nso", True, "why", "so"),
        ("\n<think>\nwhy</think>so", False, "why", "so"),
        ("<think>\nwhy</think>so", True, "why", "so"),
        ("</think>so", True, "", "so"),
        ("<think>why</think> so", False, "why", "so"),
        ("<think>\n\n</think>\n\n    code", False, "", "    code"),
        ("<think>a < b </ c</think>d < e", False, "a < b </ c", "d < e"),
        ("<think>never ends", False, "never ends", ""),
        ("<think>cut </thi", False, "cut", ""),
        ("thought unseen</think>so", False, "", "thought unseenso"),
        ("<think>a</think>Write <think> and </think>.", False, "a", "Write <think> and </think>."),
        ("<think>a</think>\n<think>b</think>c", False, "ab", "c"),
        ("a <thin", False, "", "a <thin"),
        ("", True, "", ""),
        ("   \n", False, "", "   \n"),
    ],
)
def test_thought_and_answer_are_told_apart(
    text: str, opened: bool, thought: str, said: str, by: int
) -> None:
    assert split(text, opened=opened, by=by) == (thought, said)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<|channel|>analysis", "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
         "<|channel|>final<|message|>so<|return|>"),
        ("<|channel>thought", "<|channel>thought\nwhy<channel|>so"),
        ("<|START_THINKING|>", "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>so"
         "<|END_RESPONSE|>"),
        ("<|inner_prefix|>", "<|inner_prefix|>why<|inner_suffix|>so"),
        ("[THINK]", "[THINK]why[/THINK]so"),
        ("<seed:think>", "<seed:think>why</seed:think>so"),
        ("<mm:think>", "<mm:think>why</mm:think>so"),
        ("response between <response></response>", "<think>why</think>\n<response>so</response>"),
        ("<think>", "<think>why</think>so"),
        ("'<|open|>' + tag", "<|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>so"
         "<|close|>response<|sep|>"),
    ],
)  # fmt: skip
def test_each_family_is_known_by_its_template_and_split(template: str, text: str) -> None:
    family = ReasoningFamily.of(template)
    assert [split(text, family, by=by) for by in (1, 2, 7, 999)] == [("why", "so")] * 4


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "thi", "a", " ", "\n", "</"]), max_size=12
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_pieces_do_not_matter(words: list[str], by: int, opened: bool) -> None:
    text = "".join(words)
    assert split(text, opened=opened, by=by) == split(text, opened=opened, by=10**6)


@settings(max_examples=100, deadline=None)
@given(st.text("ab <\n/>thik", max_size=30), st.integers(1, 5))
def test_text_without_tags_passes_untouched(text: str, by: int) -> None:
    if "<think>" not in text and "</think>" not in text:
        assert split(text, by=by) == ("", text)


def test_reasoning_streams_before_it_ends() -> None:
    answer_parser = ReasoningParser(THINK)
    assert answer_parser.feed("<think>first, ") == [Thought("first,")]
    assert answer_parser.feed("then </") == [Thought(" then")]


def test_a_prompt_that_ends_inside_a_block_is_noticed() -> None:
    assert THINK.left_open("assistant\n<think>\n")
    assert not THINK.left_open("assistant\n<think>\n\n</think>\n\n")
    assert THINK.left_open("<think>x</think> <think>half", since=5)


def test_families_have_different_names() -> None:
    assert len({family.name for family in REASONING_FAMILIES}) == len(REASONING_FAMILIES)
