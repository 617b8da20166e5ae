"""Attachments stay at their places while messages are joined, summarized and exported."""

from localchat.chat.conversation import Conversation, Inclusion, Question
from localchat.chat.export import as_data, as_markdown
from localchat.chat.prompt_messages import sent_messages
from localchat.chat.titles import title_for
from localchat.engine.attachments import described_content, join_parts
from localchat.engine.request import Attachment, Message
from tests.support.media import png

PICTURE = Attachment("image", png(), 3, "chart.png")


def test_a_separator_stands_between_texts_only() -> None:
    content = join_parts(["a", "b", PICTURE, "c", PICTURE, PICTURE, "d", "e"])
    assert content.text == "a\nbcd\ne"
    assert [item.position for item in content.attachments] == [3, 4, 4]


def test_a_question_moves_with_what_it_includes() -> None:
    question = Question("abc", (Inclusion("f", 0, 2),), (PICTURE,))
    moved = question.moved("xxabc", 2)
    assert moved.inclusions[0].start == 2 and moved.attachments[0].position == 5


def test_joined_questions_and_summaries_move_pictures() -> None:
    conversation = Conversation()
    first = conversation.add(Message("user", "old"), parent=None)
    summary = conversation.add(Message("system", "sum"), parent=first.id, replaces=[first.id])
    second = conversation.add(Message("user", "one", attachments=(PICTURE,)), parent=summary.id)
    conversation.add(Message("user", "two", attachments=(PICTURE,)), parent=second.id)
    (message,) = sent_messages(conversation)
    assert described_content(message).endswith("\n\none[image: chart.png]\n\ntwo[image: chart.png]")


def test_an_unanswered_picture_without_words_is_sent() -> None:
    conversation = Conversation()
    conversation.add(Message("user", "", attachments=(Attachment("image", png()),)), parent=None)
    assert len(sent_messages(conversation)[0].attachments) == 1
    assert title_for(conversation) == "image"


def test_exports_name_and_embed_pictures() -> None:
    conversation = Conversation()
    conversation.add(Message("user", "one two", attachments=(PICTURE,)), parent=None)
    assert "one[image: chart.png] two" in as_markdown(conversation)
    assert "![chart.png](data:image/png;base64,iVBOR" in as_markdown(conversation, embed=True)
    (record,) = as_data(conversation)["messages"]
    assert record["attachments"][0]["data"].startswith("iVBOR")
