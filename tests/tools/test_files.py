"""Reading, listing, searching and editing files of a folder."""

from pathlib import Path

import pytest

from tests.support.tool_scenes import ToolScene


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\ntwo\nthree\n")
    (folder / "src").mkdir()
    (folder / "src" / "main.py").write_text("PORT = 8000\nprint(PORT)\n")
    return folder


def test_a_short_file_is_returned_as_it_is(folder: Path) -> None:
    assert ToolScene(folder).text("read_file", path="notes.txt") == "one\ntwo\nthree"


def test_a_range_of_lines_says_where_it_is_and_takes_numbers_as_text(folder: Path) -> None:
    text = ToolScene(folder).text("read_file", path="notes.txt", start_line="2", end_line="2")
    assert text == "Lines 2 to 2 of 3 of notes.txt:\ntwo"
    assert (
        ToolScene(folder).text("read_file", path="notes.txt", start_line=0, end_line=3).count("\n")
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "none.txt"}, "there is no file none.txt"),
        ({"path": "src"}, "src is a folder"),
        ({"path": "notes.txt", "start_line": 9}, "has only 3 lines"),
        ({"path": "notes.txt", "start_line": -1}, "`int` >= 0"),
        ({"file": "notes.txt"}, "invalid"),
    ],
)
def test_a_wrong_call_of_read_file_is_an_error_for_the_model(
    folder: Path, arguments: dict[str, object], message: str
) -> None:
    result = ToolScene(folder).call("read_file", **arguments)
    assert result.run.state == "failed"
    assert message in result.message.content


def test_a_folder_lists_files_with_sizes(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    assert ToolScene(folder).text("list_folder").splitlines() == [
        "link  (link, not followed)",
        "notes.txt  14 B",
        "src/",
    ]


def test_a_search_finds_lines_and_names_but_nothing_ignored(folder: Path) -> None:
    (folder / ".gitignore").write_text("# build\n*.log\nout/\n")
    (folder / "a.log").write_text("PORT\n")
    (folder / "out").mkdir()
    (folder / "out" / "b.txt").write_text("PORT\n")
    scene = ToolScene(folder)
    text = scene.text("search_files", pattern="port")
    assert text.splitlines() == ["src/main.py:1: PORT = 8000", "src/main.py:2: print(PORT)"]
    names = scene.text("search_files", pattern=r"\.py$", names_only=True)
    assert names.splitlines()[:-1] == ["src/main.py"]
    assert scene.text("search_files", pattern="PORT", path="src/main.py").count("\n") == 1


def test_a_pattern_that_never_ends_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.tools.search._TIMEOUT_S", 0.8)
    (folder / "a.txt").write_text("a" * 60 + "b\n")
    assert "took more than" in ToolScene(folder).text("search_files", pattern="(a+)+$")


def test_an_edit_replaces_a_unique_text_and_keeps_mode_and_line_breaks(folder: Path) -> None:
    file = folder / "run.sh"
    file.write_bytes(b"echo a\r\necho b\r\n")
    file.chmod(0o750)
    scene = ToolScene(folder)
    result = scene.call("edit_file", path="run.sh", old_text="a\necho b", new_text="c\necho d")
    assert result.run.state == "done"
    assert file.read_bytes() == b"echo c\r\necho d\r\n"
    assert file.stat().st_mode & 0o777 == 0o750
    ((_, plan),) = scene.consent.asked
    assert "-echo a\n" in plan.preview
    assert "+echo c\n" in plan.preview


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("e", "occurs 3 times"),
        ("four", "does not occur"),
        ("", "exists"),
        ("one", "nothing would"),
        ("zero", "does not occur"),
    ],
)
def test_an_edit_that_is_not_exact_changes_nothing_and_asks_nobody(
    folder: Path, old: str, message: str
) -> None:
    scene = ToolScene(folder)
    # A part of a line is no sign of an edit that is made already.
    new = {"one": "one", "zero": "tw"}.get(old, "x")
    assert message in scene.text("edit_file", path="notes.txt", old_text=old, new_text=new)
    assert (folder / "notes.txt").read_text() == "one\ntwo\nthree\n"
    assert not scene.consent.asked


@pytest.mark.parametrize(("old", "new"), [("", "one\ntwo"), ("zero", "one")])
def test_an_edit_that_is_made_already_says_so(folder: Path, old: str, new: str) -> None:
    scene = ToolScene(folder)
    result = scene.call("edit_file", path="notes.txt", old_text=old, new_text=new)
    # Not a failure, after which the model would be made to call again.
    assert result.run.state == "done"
    assert result.message.content.startswith("notes.txt has new_text already")
    assert not scene.consent.asked
    assert "same call" in scene.text("edit_file", path="notes.txt", old_text=old, new_text=new)


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        ("return a - b", "return a + b", "def add(a, b):\n    return a + b\n"),
        ("def add(a, b):\nreturn a - b\n", "pass", "pass\n"),
        ("\treturn a - b", "\tc = a\n\treturn c", "def add(a, b):\n    c = a\n    return c\n"),
        ("\treturn a - b\n", "", "def add(a, b):\n"),
        ("\treturn a - b", "\treturn a", "def add(a, b):\n    return a\n"),
    ],
)
def test_an_edit_finds_lines_whose_indentation_differs(
    tmp_path: Path, old: str, new: str, after: str
) -> None:
    file = tmp_path / "calc.py"
    file.write_text("def add(a, b):\n    return a - b\n")
    result = ToolScene(tmp_path).call("edit_file", path="calc.py", old_text=old, new_text=new)
    assert result.run.state == "done"
    assert file.read_text() == after


def test_an_edit_of_similar_lines_needs_unique_ones(tmp_path: Path) -> None:
    file = tmp_path / "calc.py"
    file.write_text("if a:\n    b()\n    b()\n")
    text = ToolScene(tmp_path).text("edit_file", path="calc.py", old_text="\tb()", new_text="c()")
    assert "does not occur" in text
    assert file.read_text() == "if a:\n    b()\n    b()\n"


def test_a_new_file_gets_its_folders(folder: Path) -> None:
    scene = ToolScene(folder)
    text = scene.text("edit_file", path="a/b/new.txt", old_text="", new_text="hi\n")
    assert text == "Created a/b/new.txt."
    assert (folder / "a" / "b" / "new.txt").read_text() == "hi\n"


def test_a_hard_link_to_a_file_outside_keeps_its_bytes(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("kept\n")
    (folder / "inside.txt").hardlink_to(outside)
    ToolScene(folder).call("edit_file", path="inside.txt", old_text="kept", new_text="changed")
    assert outside.read_text() == "kept\n"
    assert (folder / "inside.txt").read_text() == "changed\n"


def test_a_file_that_changes_during_the_question_is_left(folder: Path) -> None:
    scene = ToolScene(folder)
    file = folder / "notes.txt"
    original = scene.consent.ask

    async def change_and_allow(*call: object) -> object:
        file.write_text("changed by the user\n")
        return await original(*call)  # type: ignore[arg-type]

    scene.consent.ask = change_and_allow  # type: ignore[assignment, method-assign]
    result = scene.call("edit_file", path="notes.txt", old_text="one", new_text="1")
    assert result.run.state == "failed"
    assert "has changed meanwhile" in result.message.content
    assert file.read_text() == "changed by the user\n"


def test_a_missing_file_is_answered_with_files_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "docs" / "old").mkdir(parents=True)
    (tmp_path / "docs" / "old" / "Report.md").write_text("text")
    text = ToolScene(tmp_path).text("read_file", path="report.md")
    assert "there is no file report.md" in text
    assert "docs/old/Report.md" in text


def test_a_search_does_what_is_meant(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("fine\nERROR disk full\n")
    scene = ToolScene(tmp_path)
    of_file = scene.text("search_files", pattern="error", path="server.log", names_only=True)
    assert of_file == "server.log:2: ERROR disk full"
    invented = scene.text("search_files", pattern="disk", path="path/to/logs")
    assert invented.splitlines()[0] == "server.log:2: ERROR disk full"
    assert "no path/to/logs" in invented


def test_a_search_without_a_match_in_one_file_shows_the_file(tmp_path: Path) -> None:
    (tmp_path / "todo.md").write_text("- water\n" + "- stamps\n" * 100)
    text = ToolScene(tmp_path).text("search_files", pattern="todo.md", path="todo.md")
    assert text.splitlines()[:2] == ["No line of todo.md matches. Its text:", "- water"]
    assert len(text.splitlines()) == 61


@pytest.mark.parametrize("data", [b"", b"\0\1binary"])
def test_a_search_in_a_file_without_text_finds_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data").write_bytes(data)
    text = ToolScene(tmp_path).text("search_files", pattern="x", path="data", names_only=True)
    assert text == "No match in 1 file."


def test_a_search_without_matching_lines_names_the_files_that_match(folder: Path) -> None:
    text = ToolScene(folder).text("search_files", pattern="main.py")
    assert text.splitlines() == ["No line matches, but these names of files do:", "src/main.py"]


def test_a_search_without_any_match_names_a_few_files(folder: Path) -> None:
    scene = ToolScene(folder)
    text = scene.text("search_files", pattern="database")
    assert text.splitlines() == ["No match in 2 files:", "notes.txt", "src/main.py"]
    for number in range(20):
        (folder / f"{number}.txt").write_text("x\n")
    assert scene.text("search_files", pattern="data") == "No match in 22 files."


def test_names_that_match_do_not_end_a_search_of_lines(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / f"a{number:03}.txt").write_text("x\n")
    (tmp_path / "b.txt").write_text("a\n")
    assert ToolScene(tmp_path).text("search_files", pattern="a") == "b.txt:1: a"


def test_a_pattern_that_is_no_regular_expression_is_a_text_or_wildcards(folder: Path) -> None:
    scene = ToolScene(folder)
    assert scene.text("search_files", pattern="print(") == "src/main.py:2: print(PORT)"
    names = scene.text("search_files", pattern="*.py", names_only=True)
    assert names.splitlines()[:-1] == ["src/main.py"]
