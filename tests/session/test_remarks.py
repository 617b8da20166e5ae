"""Remarks wait for an answer, and go with their cause."""

from localchat.session.remarks import NoticeKind, Remark, Remarks


def test_a_newer_passing_remark_of_the_same_cause_replaces_the_older() -> None:
    shown: dict[str, str] = {}
    remarks = Remarks(lambda text, kind: shown.setdefault(text, text), shown.__delitem__)
    for threads in ("3 threads", "1 thread"):
        remarks.add(Remark(f"Slower than usual: busy. Computing with {threads}.", "info", True))
    assert list(shown) == ["Slower than usual: busy. Computing with 1 thread."]
    remarks.begin_answer()
    assert not shown


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


def test_a_sentence_is_shown_once_when_the_engine_announces_and_lists_it() -> None:
    shown: dict[str, str] = {}
    numbers = iter(range(9))

    def show(text: str, kind: NoticeKind) -> str:
        id_ = f"notice/{next(numbers)}"
        shown[id_] = text
        return id_

    remarks = Remarks(show, shown.__delitem__)
    remarks.begin_answer()
    for passing in (True, False):
        remarks.add(Remark("The template has no tools.", "info", passing))
    remarks.release()
    assert list(shown.values()) == ["The template has no tools."]
    for passing in (True, False):
        remarks.add(Remark("The template has no thoughts.", "info", passing))
    assert list(shown.values())[1:] == ["The template has no thoughts."]
