"""The recorder of a session while its history cannot be opened."""

from pathlib import Path

import pytest

from localchat.errors import HistoryUnusable
from localchat.history.store import History
from localchat.session.recorder import ConversationRecorder
from tests.support.conversations import talk

PROBLEM = HistoryUnusable("the disk is full")


def test_a_history_that_opens_later_gets_the_whole_conversation(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    recorder = ConversationRecorder()
    recorder.hold(talk("one", "answer"))
    recorder.fail(PROBLEM)
    troubles = [recorder.trouble]
    recorder.attach(History.open(file))
    assert [*troubles, recorder.trouble] == [PROBLEM, None]
    recorder.close()
    with History.open(file) as history:
        assert len(history.load(history.list()[0].id).nodes) == 2


@pytest.mark.parametrize("texts", [(), ("one", "answer")])
def test_the_end_reports_messages_that_were_never_saved(texts: tuple[str, ...]) -> None:
    recorder = ConversationRecorder()
    recorder.hold(talk(*texts))
    recorder.fail(PROBLEM)
    if not texts:
        recorder.close()
        return
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        recorder.close()
