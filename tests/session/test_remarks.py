"""Remarks wait for an answer, and go with their cause."""

from localchat.session.remarks import NoticeKind, Remark, Remarks


def test_a_passing_remark_goes_when_the_next_answer_begins() -> None:
    shown: dict[str, str] = {}

    def show(sentence: str, kind: NoticeKind) -> str:
        shown[sentence] = kind
        return sentence

    remarks = Remarks(show, shown.__delitem__)
    remarks.begin_answer()
    remarks.add(Remark("slower than usual", "info", passing=True))
    remarks.add(Remark("the context is shorter", "warning", passing=False))
    assert not shown
    remarks.release()
    assert shown == {"slower than usual": "info", "the context is shorter": "warning"}
    remarks.begin_answer()
    assert list(shown) == ["the context is shorter"]
    remarks.release()
    remarks.add(Remark("at once", "info", passing=False))
    assert "at once" in shown
