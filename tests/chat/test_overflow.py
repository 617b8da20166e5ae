"""Context overflow: messages sent, messages dropped and offers made, at one token a character."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from localchat.chat.compaction import Compaction, without_summary
from localchat.chat.conversation import Conversation, Policy
from localchat.chat.overflow import (
    LeaveOutSearch,
    counter,
    examine,
    known_context,
    leave_out,
    longer_context,
    reserve_tokens,
)
from localchat.chat.prompt_messages import left_out, sent_messages, unsent_ids
from localchat.engine.events import MetricsSnapshot, Prefill
from localchat.engine.interface import MemoryParts
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.errors import ContextExceeded, UsageError
from localchat.session.blocks import SummaryBlock
from localchat.session.view import node_blocks
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tui_stage import DONE, INFO

ENGINE = ScriptedEngine(context_tokens=2000)
COUNT = counter(ENGINE)


def talk(sizes: list[int], *, system: str = "", question: str = "last") -> Conversation:
    """Exchanges with texts of these sizes, and a question that waits."""
    conversation = Conversation(system=system)
    for number, size in enumerate(sizes):
        for role in ("user", "assistant"):
            text = f"{role} {number} " + ("x" if size % 2 else "語") * size
            conversation.add(Message(role, text), parent=conversation.head)
    conversation.add(Message("user", question), parent=conversation.head)
    return conversation


def sent_tokens(conversation: Conversation) -> int:
    return COUNT(Messages(sent_messages(conversation)))


def test_instructions_come_first_and_answers_without_a_word_are_not_sent() -> None:
    conversation = Conversation(system="be brief")
    one = conversation.add(Message("user", "one"), parent=None)
    failed = conversation.add(Message("assistant"), parent=one.id, state="failed")
    conversation.add(Message("user", "two"), parent=failed.id)
    assert sent_messages(conversation) == (
        Message("system", "be brief"),
        Message("user", "one\n\ntwo"),
    )


def test_a_summary_opens_the_first_question_and_never_an_answer() -> None:
    conversation = talk([5, 5], question="last")
    first = conversation.path()[0]
    waiting = conversation.head
    conversation.add(Message("system", "all said"), parent=waiting, replaces=[first.id])
    roles = [
        (message.role, "all said" in message.content) for message in sent_messages(conversation)
    ]
    assert roles[:2] == [("assistant", False), ("user", True)]
    assert [told for _, told in roles].count(True) == 1


def test_an_empty_conversation_sends_nothing() -> None:
    assert sent_messages(Conversation()) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=30),
    st.integers(50, 3000),
    st.sampled_from(["", "be brief"]),
)
def test_a_cut_is_the_smallest_that_fits_and_tells_exact_numbers(
    sizes: list[int], allowed: int, system: str
) -> None:
    conversation = talk(sizes, system=system)
    whole = sent_tokens(conversation)
    path = conversation.path()
    cut = LeaveOutSearch(conversation, COUNT).plan(allowed)
    least = talk([], system=system)
    if cut is None:
        assert sent_tokens(least) > allowed
        return
    assert cut.nodes == tuple(node.id for node in path[: len(cut.nodes)])
    assert len(cut.nodes) % 2 == 0
    leave_out(conversation, cut)
    assert sent_tokens(conversation) == cut.prompt_tokens <= allowed
    assert cut.tokens == whole - cut.prompt_tokens
    assert cut.messages == len(cut.nodes) == len(left_out(conversation))
    if cut.nodes:
        conversation.policy = Policy("leave_out_oldest", cut.nodes[:-2])
        assert sent_tokens(conversation) > allowed


def test_few_counts_find_the_cut() -> None:
    calls = 0

    def count(messages: Messages) -> int:
        nonlocal calls
        calls += 1
        return COUNT(messages)

    cut = LeaveOutSearch(talk([index % 90 for index in range(500)]), count).plan(7_500)
    assert cut is not None
    assert 0 < len(cut.nodes) < 1000
    assert calls <= 11


def test_a_second_cut_tells_all_that_is_not_sent() -> None:
    conversation = talk([100] * 20)
    whole = sent_tokens(conversation)
    for allowed in (3000, 1000):
        cut = LeaveOutSearch(conversation, COUNT).plan(allowed)
        assert cut is not None
        leave_out(conversation, cut)
    assert cut is not None
    assert cut.messages == len(conversation.policy.left_out) == len(unsent_ids(conversation))
    assert cut.tokens == conversation.policy.left_out_tokens == whole - sent_tokens(conversation)
    conversation.policy = Policy()
    assert sent_tokens(conversation) == whole


def test_the_last_question_and_the_instructions_always_stay() -> None:
    conversation = talk([10] * 3, question="y" * 5000)
    overflow = examine(conversation, COUNT, ENGINE.info())
    assert overflow.leave_out is None
    assert overflow.choices == ()  # no summary of the rest makes it fit
    assert "the last question alone is too long" in overflow.sentence
    assert "alone" not in examine(talk([100] * 20), COUNT, ENGINE.info()).sentence


@pytest.mark.parametrize("details", [{}, {"prompt_tokens": 2500}])
def test_what_cannot_be_counted_is_too_long(details: dict[str, Any]) -> None:
    class LimitedEngine(ScriptedEngine):
        def prompt_tokens(self, messages: Messages) -> list[int]:
            tokens = super().prompt_tokens(messages)
            if len(tokens) > 3000:
                raise ContextExceeded("too long", context_tokens=2000, **details)
            return tokens

    engine = LimitedEngine(context_tokens=2000)
    cut = LeaveOutSearch(talk([100] * 40), counter(engine)).plan(1500)
    assert cut is not None
    assert cut.prompt_tokens <= 1500


def test_the_offers_name_messages_tokens_and_memory() -> None:
    info = replace(
        ENGINE.info(),
        context_train=32768,
        free_bytes=10_000_000,
        predicted_bytes=2_000_000,
        predicted=MemoryParts(1_000_000, 1_000_000, 0, 0),
    )
    overflow = examine(talk([100] * 20), COUNT, info)
    told = {choice.action: choice for choice in overflow.choices}
    assert list(told) == ["leave_out_oldest", "compact", "longer_context"]
    assert overflow.leave_out is not None
    assert f"oldest {len(overflow.leave_out.nodes)} messages" in told["leave_out_oldest"].label
    assert f"{overflow.leave_out.tokens:,} tokens" in told["leave_out_oldest"].label
    longer = told["longer_context"]
    assert longer.tokens > overflow.prompt_tokens
    assert longer.settings == (("context_length", str(longer.tokens)),)
    assert longer.label.endswith(" more")
    tight = replace(info, free_bytes=1_500_000)
    assert len(examine(talk([100] * 20), COUNT, tight).choices) == 2


def test_a_longer_context_costs_the_user_as_little_as_possible() -> None:
    info = replace(
        INFO, context_tokens=1024, context_train=8192, actual=MemoryParts(90, 2048, 10, 10)
    )
    info = replace(info, actual_bytes=2158, kv_type="f16", kv_types=("f16", "q8_0"))
    same = longer_context(1100, replace(info, free_bytes=2158 + 4096))
    assert same is not None
    assert dict(same.settings).keys() == {"context_length"}
    smaller = longer_context(1100, replace(info, free_bytes=2158))
    assert smaller is not None
    assert dict(smaller.settings)["kv_cache_type"] == "q8_0"
    assert "KV cache in q8_0" in smaller.label


def test_one_message_to_leave_out_is_told_in_the_singular() -> None:
    unanswered = Conversation()
    for text in ("x" * 5000, "last"):
        unanswered.add(Message("user", text), parent=unanswered.head)
    label = examine(unanswered, COUNT, ENGINE.info()).choices[0].label
    assert label.startswith("leave out the oldest message (5,")


def test_a_backend_offers_the_small_cache_that_it_has() -> None:
    info = replace(
        ENGINE.info(),
        context_train=20_000,
        backend="cuda",
        kv_type="bf16",
        kv_types=("bf16", "fp8"),
    )
    parts = MemoryParts(0, 16_000, 0, 0)
    full = replace(info, context_tokens=16_000, actual=parts, actual_bytes=1, free_bytes=1)
    choice = longer_context(19_000, full)
    assert choice is not None
    assert "in fp8" in choice.label
    assert longer_context(19_000, replace(full, kv_type="fp8")) is None


def test_the_refusal_knows_the_context_where_the_engine_does_not() -> None:
    info = replace(ENGINE.info(), context_tokens=0)
    refusal = ContextExceeded("too long", prompt_tokens=3000, context_tokens=2000)
    overflow = examine(talk([100] * 20), COUNT, info, refusal=refusal)
    assert overflow.context_tokens == 2000
    assert overflow.leave_out is not None
    assert overflow.leave_out.prompt_tokens <= 1500


@pytest.mark.parametrize(
    ("context", "details"),
    [
        (0, {}),
        (0, {"prompt_tokens": 3000}),
        (1_000_000, {}),
        (1_000_000, {"prompt_tokens": 3000}),
        (2000, {"context_tokens": 1_000_000}),
    ],
)
def test_numbers_that_nobody_told_or_that_do_not_agree_are_not_made_up(
    context: int, details: dict[str, Any]
) -> None:
    info = replace(ENGINE.info(), backend="remote", context_tokens=context)
    refusal = ContextExceeded("too long", **details)
    with pytest.raises(UsageError):
        examine(talk([100] * 20), COUNT, info, refusal=refusal)


def test_the_memory_of_a_remote_is_not_offered() -> None:
    info = replace(ENGINE.info(), backend="remote", context_train=32768)
    actions = [choice.action for choice in examine(talk([100] * 20), COUNT, info).choices]
    assert actions == ["leave_out_oldest", "compact"]


def test_of_two_contexts_the_smaller_one_that_is_told_holds() -> None:
    info = replace(ENGINE.info(), context_tokens=2000)
    refusal = ContextExceeded("too long", context_tokens=1000)
    overflow = examine(talk([100] * 20), COUNT, info, refusal=refusal)
    assert known_context(info, overflow) == known_context(replace(info, context_tokens=0), overflow)
    assert known_context(info, overflow) == 1000
    assert known_context(info, None) == 2000
    assert known_context(replace(info, context_tokens=0), None) == 0


def test_no_memory_is_offered_where_the_model_knows_no_longer_context() -> None:
    actions = [choice.action for choice in examine(talk([100] * 20), COUNT, ENGINE.info()).choices]
    assert actions == ["leave_out_oldest", "compact"]


@pytest.mark.parametrize(("context", "most", "reserve"), [(4096, None, 1024), (4096, 9999, 2048)])
def test_room_for_the_answer_is_a_quarter_or_what_is_allowed(
    context: int, most: int | None, reserve: int
) -> None:
    assert reserve_tokens(context, most) == reserve


def compacted(conversation: Conversation, context: int = 2000) -> list[GenerateRequest]:
    run = Compaction(conversation, COUNT, context)
    asked = []
    while (request := run.request()) is not None:
        asked.append(request)
        run.take(f"summary {len(asked)} " + "s" * 100)
    run.finish()
    return asked


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2500), min_size=1, max_size=12), st.booleans())
def test_a_summary_is_asked_for_in_stretches_that_fit(sizes: list[int], answered: bool) -> None:
    conversation = talk(sizes)
    if answered:
        conversation.add(Message("assistant", "so"), parent=conversation.head)
    texts = [node.message.content for node in conversation.path()]
    asked = compacted(conversation)
    for request in asked:
        assert isinstance(request.prompt, Messages)
        assert request.max_tokens is not None
        assert COUNT(request.prompt) + request.max_tokens <= 2000
    sent = sent_messages(conversation)
    assert f"summary {len(asked)} " in sent[0].content
    assert [message.role for message in sent] == ["user", "assistant"] * (len(sent) // 2) + (
        [] if answered else ["user"]
    )
    assert sent[-1].content.endswith(texts[-1])
    read = "".join(str(request.prompt.messages[0].content) for request in asked)  # type: ignore[union-attr]
    assert sum(read.count(sign) for sign in "x語") >= sum(sizes[: len(sizes) - 2])


def test_a_question_that_waits_comes_behind_the_summary() -> None:
    conversation = talk([10, 20, 30, 40, 50])
    waiting = conversation.head
    compacted(conversation)
    assert conversation.head == waiting
    summary = conversation.path()[-2]
    assert summary.replaces == tuple(
        node.id for node in conversation.path()[: len(summary.replaces)]
    )
    assert unsent_ids(conversation) == set(summary.replaces)


def test_a_second_summary_takes_the_first_one_up() -> None:
    conversation = talk([200] * 6)
    compacted(conversation)
    for number in range(6):
        conversation.add(Message("assistant", f"a{number}"), parent=conversation.head)
        conversation.add(Message("user", f"q{number} " + "z" * 150), parent=conversation.head)
    asked = compacted(conversation)
    assert "s" * 100 in asked[0].prompt.messages[0].content  # type: ignore[union-attr]
    text = "\n".join(message.content for message in sent_messages(conversation))
    assert text.count("Summary of the conversation so far") == 1
    assert text.count("sssss") == 20


@pytest.mark.parametrize("answered", [True, False])
def test_a_summary_can_be_taken_back(answered: bool) -> None:
    conversation = talk([10, 20, 30, 40, 50])
    before, nodes = sent_messages(conversation), set(conversation.nodes)
    if answered:
        conversation.add(Message("assistant", "so"), parent=conversation.head)
        before = sent_messages(conversation)
    for _ in range(2):
        compacted(conversation)
    changed = without_summary(conversation)
    assert sent_messages(conversation) == before
    assert nodes < set(conversation.nodes)
    assert all(conversation.nodes[node.id] == node for node in changed)
    assert without_summary(conversation) == ()


def test_a_branch_without_the_summary_is_sent_as_it_was() -> None:
    conversation = talk([10, 20, 30, 40, 50])
    before = conversation.path()[1]
    compacted(conversation)
    conversation.back_to(before.id)
    assert [message.content for message in sent_messages(conversation)] == [
        node.message.content for node in conversation.path()
    ]


def test_there_is_nothing_to_sum_up_in_one_question() -> None:
    with pytest.raises(UsageError, match="nothing to summarize"):
        Compaction(talk([]), COUNT, 2000)


def test_an_empty_summary_is_refused_and_a_context_too_short_for_any_is_said() -> None:
    run = Compaction(talk([10, 20, 30, 40, 50]), COUNT, 2000)
    assert run.request() is not None
    with pytest.raises(UsageError, match="empty"):
        run.take(" \n")
    with pytest.raises(ContextExceeded, match="too short"):
        Compaction(talk([10, 20, 30, 40, 50]), COUNT, 300)


@pytest.mark.parametrize(("context", "offered"), [(300, False), (800, False), (1200, True)])
def test_a_summary_is_offered_if_the_context_has_room_for_all_its_requests(
    context: int, offered: bool
) -> None:
    conversation = talk([100] * 20)
    info = replace(ENGINE.info(), backend="remote", context_tokens=context)
    actions = [choice.action for choice in examine(conversation, COUNT, info).choices]
    assert ("compact" in actions) == offered
    if offered:
        run = Compaction(conversation, COUNT, context)
        while run.request() is not None:
            run.take("s" * (run.summary_tokens - 30))


def test_progress_counts_the_tokens_that_are_read_and_written() -> None:
    run = Compaction(talk([10, 20, 30, 40, 50]), COUNT, 2000)
    assert run.request() is not None
    shares = [run.progress]
    for event in (
        Prefill(50, 0, 100),
        Prefill(100, 0, 100),
        MetricsSnapshot("decode", completion_tokens=run.summary_tokens // 2),
    ):
        run.observe(event)
        shares.append(run.progress)
    assert shares[0] == 0
    assert shares == sorted(set(shares))
    assert shares[-1] < 1
    run.take("a summary")
    assert run.progress == 1


def test_a_summary_knows_its_length() -> None:
    conversation = talk([10, 20, 30, 40, 50])
    run = Compaction(conversation, COUNT, 2000)
    while run.request() is not None:
        run.observe(DONE)
        run.take("a summary")
    (summary, *_) = run.finish(INFO)
    blocks = list(node_blocks(conversation, summary))
    assert isinstance(blocks[0], SummaryBlock)
    assert blocks[0].tokens == DONE.usage.completion_tokens


def test_the_longer_context_holds_twice_the_conversation_if_memory_allows() -> None:
    info = replace(
        INFO, context_tokens=4096, context_train=16_384, actual=MemoryParts(90, 4096, 10, 10)
    )
    info = replace(info, actual_bytes=4206, free_bytes=10**9)
    longer = longer_context(5000, info)
    assert longer is not None
    assert longer.tokens == 10_240
    tight = longer_context(5000, replace(info, free_bytes=4206 + 2048))
    assert tight is not None
    assert tight.tokens == 6144
