"""Whatever an engine tells, its answer falls into blocks that are opened, filled and closed one by one."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from localchat.engine.events import Reasoning, Text, TokenLogprob, ToolCall
from localchat.server.chat.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    CollectedAnswer,
    ContentBlocks,
)
from localchat.server.generation import ChoiceEnd, OutputEvent, PromptEcho

WORDS = st.text("ab ", max_size=3)
CALL = st.lists(WORDS.filter(bool), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[OutputEvent]:
    """Answers of one choice: tool calls one after the other, each begun by its name."""
    sent: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(("text", "reasoning", "call")), max_size=8)):
        if kind == "call":
            sent.append(ToolCall(0, calls, f"call_{calls}", "look"))
            sent += [ToolCall(0, calls, arguments=piece) for piece in draw(CALL)]
            calls += 1
        else:
            word = draw(WORDS)
            sent.append(Text(0, word) if kind == "text" else Reasoning(0, word))
    return [*sent, ChoiceEnd(0, draw(st.sampled_from(("stop", "length"))))]


@given(answers())
def test_blocks_are_opened_filled_and_closed_in_turn(sent: list[OutputEvent]) -> None:
    blocks = ContentBlocks()
    changes: list[BlockEvent] = [change for each in sent for change in blocks.add(each)]
    opened = [change.block for change in changes if isinstance(change, BlockOpened)]
    assert [block.index for block in opened] == list(range(len(opened)))
    assert opened == blocks.blocks != []
    current = None
    for change in changes:
        match change:
            case BlockOpened(block):
                assert current is None
                current = block
            case BlockDelta(block):
                assert block is current
            case BlockClosed(block):
                assert block is current
                current = None
    assert current is None and blocks.end is sent[-1]


@given(answers())
def test_no_word_is_lost_and_neighbours_differ(sent: list[OutputEvent]) -> None:
    blocks = ContentBlocks()
    for each in sent:
        blocks.add(each)
    for kind, of in (("text", Text), ("reasoning", Reasoning)):
        held = "".join(block.text for block in blocks.blocks if block.kind == kind)
        assert held == "".join(each.text for each in sent if isinstance(each, of))
    arguments = "".join(block.text for block in blocks.blocks if block.kind == "call")
    assert arguments == "".join(each.arguments for each in sent if isinstance(each, ToolCall))
    kinds = [block.kind for block in blocks.blocks]
    assert all("call" in pair or pair[0] != pair[1] for pair in pairwise(kinds))
    assert all(block.complete for block in blocks.blocks[:-1])


def test_collected_answer_keeps_choices_apart_and_logprobs_inside_of_a_call() -> None:
    answer = CollectedAnswer(2)
    token = TokenLogprob(1, b"a", -0.5)
    for event in (
        PromptEcho(1, (token,)),
        Reasoning(0, "hm"),
        Text(0, "a", (token,)),
        ToolCall(0, 0, "call_0", "look"),
        ToolCall(0, 0, arguments="{"),
        Text(0, "", (token,)),
        ToolCall(0, 0, arguments="}"),
        Text(0, "b"),
        ChoiceEnd(0, "tool_calls"),
        ChoiceEnd(1, "length"),
    ):
        answer.add(event)
    first, second = answer.choices
    assert (first.text, first.reasoning, first.logprobs) == ("ab", "hm", (token, token))
    assert [(call.id, call.name, call.text) for call in first.calls] == [("call_0", "look", "{}")]
    assert (second.text, second.calls, second.prompt) == ("", [], (token,))
    assert [block.complete for block in second.blocks] == [False]
    assert answer.first_text_s is not None and answer.first_text_s <= answer.last_text_s
