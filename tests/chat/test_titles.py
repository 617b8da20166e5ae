"""A conversation that nobody named is called by what was typed, not by what it includes."""

import pytest

from localchat.chat.conversation import Conversation, Inclusion
from localchat.chat.titles import title_for
from localchat.engine.request import Message


def titled(text: str, *inclusions: Inclusion) -> str:
    conversation = Conversation()
    conversation.add(Message("user", text), parent=None, inclusions=inclusions)
    return title_for(conversation)


def test_a_title_is_the_question_and_not_the_file_before_it() -> None:
    file = "notes.md:\n```\nA long text.\n```"
    assert titled(f"{file} What is it about?", Inclusion("notes.md", 0, len(file))) == (
        "What is it about?"
    )
    text = f"Compare {file} and {file}"
    first, second = (8, 8 + len(file)), (13 + len(file), len(text))
    pasted = Inclusion("7 lines", *first), Inclusion("9 lines", *second)
    assert titled(text, *pasted) == "Compare and"
    files = Inclusion("a.md", *first, path="x/a.md"), Inclusion("b.md", *second, path="x/b.md")
    assert titled(text, *files) == "Compare a.md and b.md"


def test_a_file_alone_gives_its_name() -> None:
    file = "notes.md:\n```\nA long text.\n```"
    assert titled(file, Inclusion("notes.md", 0, len(file))) == "notes.md"
    assert titled("") == ""


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ("I have a dog.\nWhat should it eat?", "I have a dog."),
        ("Sum this up:\nSales rose.\n\nDo you agree?", "Sum this up:"),
        ("---\nfirst\nsecond", "first"),
        ("---\n\n***", "--- ***"),
    ],
)
def test_a_title_is_the_first_line_with_words(message: str, title: str) -> None:
    assert titled(message) == title
