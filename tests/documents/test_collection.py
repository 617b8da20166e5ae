"""A collection reads what has changed, keeps places, and finds passages by questions in natural words."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localchat.documents.collection import Changes, Collection
from localchat.documents.library import DocumentLibrary
from localchat.documents.pages import read_document
from localchat.documents.passages import LENGTH, marked_text, passages_of
from localchat.documents.question import match_query
from localchat.errors import FileMissing, LocalchatError, UsageError
from tests.support.planted_facts import write_documents


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "sub").mkdir(parents=True)
    (path / "a.md").write_text("The lease ends in May.\n")
    (path / "sub" / "b.txt").write_text("The deposit is high.\n")
    (path / "c.bin").write_bytes(b"\0\1")
    (path / ".hidden").write_text("secret")
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Iterator[Collection]:
    with DocumentLibrary(tmp_path / "documents").open("all", create=True) as opened:
        yield opened


def texts(collection: Collection) -> str:
    return marked_text(collection.passages())


def test_a_folder_is_read_with_its_places_and_binary_files_are_counted(
    collection: Collection, source: Path
) -> None:
    assert collection.learn([str(source)]) == Changes(2, 0, 0)
    assert texts(collection) == (
        "[a.md:1]\nThe lease ends in May.\n\n[sub/b.txt:1]\nThe deposit is high.\n"
    )
    found = collection.summary()
    assert (found.files, found.skipped) == (2, {"is a binary file": 1})


def test_a_full_disk_is_no_reason_to_forget_the_documents(
    collection: Collection, source: Path
) -> None:
    (source / "long.txt").write_text("It rains. " * 100_000)
    collection._db.execute("PRAGMA max_page_count = 20")  # SQLite says then that the disk is full
    with pytest.raises(LocalchatError, match="is full") as refused:
        collection.learn([str(source)])
    assert refused.value.hint == "the disk is full: make room and try again"


def test_a_link_to_itself_hides_no_file_of_its_folder(collection: Collection, source: Path) -> None:
    (source / "link").symlink_to("link")
    assert collection.learn([str(source)]) == Changes(2, 0, 0)


def test_only_what_changed_is_read_again_and_what_is_gone_goes(
    collection: Collection, source: Path
) -> None:
    collection.learn([str(source)])
    before = texts(collection)
    assert collection.learn() == Changes(0, 3, 0)
    os.utime(source / "a.md", ns=(1, 1))  # another date, the same content
    assert collection.learn().read == 0
    assert texts(collection) == before
    (source / "a.md").write_text("The lease ends in June.\n")
    (source / "sub" / "b.txt").unlink()
    assert collection.learn() == Changes(1, 1, 1)
    assert texts(collection) == "[a.md:1]\nThe lease ends in June.\n"
    assert collection.find("deposits", 8) == []
    assert [one.text for one in collection.find("june", 8)] == ["The lease ends in June."]
    assert collection.find("May", 8) == []


def test_a_source_that_is_away_keeps_its_text_and_a_new_one_must_be_there(
    collection: Collection, source: Path
) -> None:
    collection.learn([str(source)])
    before = texts(collection)
    source.rename(source.with_name("elsewhere"))
    collection.learn()
    assert texts(collection) == before
    with pytest.raises(FileMissing):
        collection.learn([str(source / "nothing")])


def test_the_text_is_the_same_however_it_was_read(tmp_path: Path, source: Path) -> None:
    library = DocumentLibrary(tmp_path / "documents")
    with library.open("once", create=True) as once:
        once.learn([str(source)])
        whole = texts(once)
    with library.open("twice", create=True) as twice:
        twice.learn([str(source / "sub" / "b.txt")])
        (source / "a.md").write_text("first")
        twice.learn([str(source)])
    (source / "a.md").write_text("The lease ends in May.\n")
    with library.open("once") as once:
        once.learn()
        assert texts(once) == whole


def test_files_of_one_name_from_two_sources_are_told_apart(
    collection: Collection, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.md").write_text(folder)
    collection.learn([str(tmp_path / "one"), str(tmp_path / "two")])
    assert sorted(one.mark for one in collection.passages()) == ["[a.md:1]", "[two/a.md:1]"]


def test_only_the_owner_may_read_it_and_forgetting_leaves_nothing(
    tmp_path: Path, source: Path
) -> None:
    library = DocumentLibrary(tmp_path / "data" / "documents")
    with library.open("all", create=True) as collection:
        collection.learn([str(source)])
    assert stat.S_IMODE(library.path("all").stat().st_mode) == 0o600
    assert stat.S_IMODE(library.folder.stat().st_mode) == 0o700
    library.forget("all")
    assert list(library.folder.iterdir()) == []
    with pytest.raises(UsageError, match="no documents @all"):
        library.open("all")


def test_removed_text_is_gone_from_the_file(collection: Collection, source: Path) -> None:
    collection.learn([str(source)])
    (source / "a.md").write_text("nothing\n")
    collection.learn()
    assert b"lease" not in collection.path.read_bytes()


def test_a_damaged_collection_says_what_helps(tmp_path: Path) -> None:
    library = DocumentLibrary(tmp_path)
    (tmp_path / "bad.sqlite3").write_bytes(b"no database, but long enough to look at" * 100)
    with pytest.raises(LocalchatError) as told:
        library.open("bad")
    assert "localchat learn --forget bad" in told.value.hint


def test_two_runs_that_read_the_same_new_file_say_try_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = DocumentLibrary(tmp_path / "library")
    scan = Collection._scan

    def scan_after_the_other(self: Collection, *arguments: Any) -> Any:
        monkeypatch.setattr(Collection, "_scan", scan)
        with library.open("same") as other:
            other.learn([str(source)])
        return scan(self, *arguments)

    monkeypatch.setattr(Collection, "_scan", scan_after_the_other)
    with library.open("same", create=True) as collection:
        with pytest.raises(LocalchatError) as caught:
            collection.learn([str(source)])
        assert caught.value.hint == "another localchat reads them: try again"
        collection.learn([str(source)])


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Leases end after three years.", "When does the lease end?"),
        ("The pumps were replaced.", "who is replacing this pump?"),
        ("Die Kündigungsfrist beträgt drei Monate.", "Welche kundigungsfristen gibt es?"),
        ("Die Prüfung der Geräte ist jährlich.", "wann wird das Gerät geprüft, PRÜFUNG"),
        ("東京の天気は晴れです。", "天気はどうですか"),
        ("To be or not to be.", "to be or not to be"),
        ('The "quoted" AND (odd) words: NEAR*', 'odd AND NEAR( "quoted'),
    ],
)
def test_a_question_in_natural_words_finds_its_passage(
    collection: Collection, tmp_path: Path, text: str, question: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("Lorem ipsum dolor sit amet.")
    collection.learn([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert collection.find(question, 1)[0].file == "a.txt"


def test_words_that_say_nothing_are_left_out_unless_there_are_no_others() -> None:
    assert match_query("What is the deposit?") == '"deposit"'
    assert match_query("Who is it?") == '"who" OR "is" OR "it"'
    assert match_query("?!") == ""


def test_passages_keep_all_text_and_their_lines() -> None:
    lines = [f"line {number} " + "word " * (number % 40) for number in range(1, 400)]
    document = read_document("a.txt", "\n".join(lines).encode())
    passages = list(passages_of("a.txt", document))
    assert len(passages) > 10
    assert max(len(one.text) for one in passages) <= LENGTH
    assert "".join("".join(one.text.split()) for one in passages) == "".join(
        " ".join(lines).split()
    )
    for one in passages:
        assert one.text.startswith(f"line {one.number} ")


def test_planted_facts_are_found_and_cited_right(collection: Collection, tmp_path: Path) -> None:
    folder = tmp_path / "generated"
    folder.mkdir()
    facts = write_documents(folder, tokens=60_000, facts=40)
    collection.learn([str(folder)])
    right = 0
    for fact in facts:
        for one in collection.find(fact.question, 8):
            if fact.sentence in one.text and one.file == fact.file:
                before = one.text[: one.text.index(fact.sentence)].count("\n")
                right += one.number + (before if fact.file.endswith(".md") else 0) == fact.number
    assert len(facts) == 40
    assert right >= 38
