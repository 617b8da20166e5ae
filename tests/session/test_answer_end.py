"""What stands below an answer: first why it is not complete, then its metrics."""

import msgspec
import pytest

from localchat.chat.conversation import AnswerMetrics, Node, NodeState
from localchat.engine.events import Done, Usage
from localchat.engine.request import Message
from localchat.session.blocks import AnswerBlock
from localchat.session.view import ended_words, footer_of
from localchat.tui.transcript.block_rows import block_rows
from tests.support.tui_stage import DONE

FULL = msgspec.structs.replace(
    DONE,
    usage=Usage(prompt_tokens=900, cached_tokens=0, completion_tokens=124),
    kv_used_tokens=1024,
    kv_total_tokens=1024,
    read_back_tokens=800,
)


def answer(state: NodeState, done: Done = DONE) -> Node:
    metrics = AnswerMetrics(
        model="m", backend="b", quantization="q", kv_type="f16", draw_seed=1, done=done
    )
    return Node(
        id="a", parent=None, message=Message("assistant", "so it is"), metrics=metrics, state=state
    )


@pytest.mark.parametrize(
    ("state", "done", "words"),
    [
        ("whole", FULL, ""),
        ("stopped", DONE, "stopped"),
        ("failed", DONE, "interrupted"),
        ("length", DONE, "stopped at the length limit"),
        ("length", FULL, "the context is full: the answer stops here"),
    ],
)
def test_an_answer_says_why_it_is_not_complete(state: NodeState, done: Done, words: str) -> None:
    assert ended_words(answer(state, done)) == words


def test_the_line_below_an_answer_has_no_drafts_and_no_cache() -> None:
    assert footer_of(answer("length", FULL)) == "TTFT 0.41 s · 62.0 tok/s"
    assert footer_of(answer("length", FULL), other_model=True).startswith("m · TTFT")


def test_the_end_stands_in_color_above_the_metrics() -> None:
    block = AnswerBlock("a", "so it is", footer="TTFT 0.41 s", ended="stopped")
    *_, end, metrics = block_rows(block, 80, is_open=False).rows
    assert "".join(piece.text for piece in end.pieces).strip() == "■ stopped"
    assert end.pieces[-1].look.tint == "warning"
    assert "TTFT" in "".join(piece.text for piece in metrics.pieces)
