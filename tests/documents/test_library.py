"""What a question gets of documents: all of them before it, or the nearest passages."""

from pathlib import Path

import pytest

from localchat.documents.library import DocumentLibrary
from localchat.errors import UsageError
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def library(tmp_path: Path) -> DocumentLibrary:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.md").write_text("The lease ends in May.\n")
    for number in range(40):
        (source / f"b{number:02}.md").write_text(f"Part {number}: " + "some other words. " * 8)
    made = DocumentLibrary(tmp_path / "documents")
    with made.open("home", create=True) as collection:
        collection.learn([str(source)])
    return made


def test_what_fits_comes_whole_and_the_same_after_a_restart(library: DocumentLibrary) -> None:
    engine = ScriptedEngine(context_tokens=20_000)
    one = library.excerpt("home", "When does the lease end?", engine)
    other = DocumentLibrary(library.folder).excerpt("home", "Something else?", engine)
    assert one == other
    assert one.text.startswith("Documents: home. ")
    assert "cite the place as it is written, for instance [a.md:1]" in one.text
    assert "\n[a.md:1]\nThe lease ends in May.\n" in one.text
    assert "Part 39" in one.text
    assert one.label == f"@home: all 41 files, {len(one.text.encode()):,} tokens"


def test_what_does_not_fit_comes_in_the_nearest_passages(library: DocumentLibrary) -> None:
    found = library.excerpt("home", "When do leases end?", ScriptedEngine(context_tokens=6000))
    assert found.label == "@home: 1 passage: a.md:1"
    assert "[a.md:1]\nThe lease ends in May." in found.text
    assert "Part 3" not in found.text


def test_passages_of_many_tokens_leave_half_of_the_context(library: DocumentLibrary) -> None:
    source = library.folder.parent / "source"
    for number in range(8):
        (source / f"c{number}.md").write_text("dense " + "字" * 1000)
    engine = ScriptedEngine(context_tokens=10_000)
    found = library.excerpt("home", "something dense", engine)
    assert found.label.startswith("@home: 1 passage: ")
    assert len(engine.tokenize(found.text)) < 5_000


def test_the_room_is_what_the_conversation_leaves(library: DocumentLibrary) -> None:
    engine = ScriptedEngine(context_tokens=20_000)
    assert "passage" in library.excerpt("home", "leases", engine, ["word " * 2500]).label


def test_what_an_earlier_message_holds_is_not_sent_twice(library: DocumentLibrary) -> None:
    engine = ScriptedEngine(context_tokens=20_000)
    whole = library.excerpt("home", "q", engine).text
    again = library.excerpt("home", "q", engine, [f"{whole}When does it end?", "In May."])
    assert (again.text, again.label) == ("", "@home: read above")


def test_a_changed_file_is_read_with_the_next_question(library: DocumentLibrary) -> None:
    engine = ScriptedEngine(context_tokens=20_000)
    library.excerpt("home", "q", engine)
    (library.folder.parent / "source" / "a.md").write_text("The lease ends in October.\n")
    assert "ends in October" in library.excerpt("home", "q", engine).text


@pytest.mark.parametrize(
    ("text", "names", "rest"),
    [
        ("@home when?", ("home",), "when?"),
        ("when? @home", ("home",), "when?"),
        ("when, @home?", ("home",), "when,?"),
        ("What does @home say?", ("home",), "What does home say?"),
        ("@home @home x", ("home",), "x"),
        ("me@home.org @homes @home/x @home.md", (), "me@home.org @homes @home/x @home.md"),
        ("@other what?", (), "@other what?"),
    ],
)
def test_a_name_after_at_is_a_mention(
    library: DocumentLibrary, text: str, names: tuple[str, ...], rest: str
) -> None:
    assert library.mentions(text) == (names, rest)


def test_included_files_mention_nothing(library: DocumentLibrary) -> None:
    text = "a.txt says @home here\n@home why?"
    assert library.mentions(text, [(0, 22)]) == (("home",), "a.txt says @home here\nwhy?")


@pytest.mark.parametrize("name", ["", "../x", "a b", "1", "ü"])
def test_a_name_is_no_path(library: DocumentLibrary, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        library.open(name, create=True)
