"""`localchat learn`, and `@NAME` before prompts, in pipes and in line mode."""

import json
import os
from pathlib import Path

import click
import pytest

from localchat.cli.document_options import complete_documents
from localchat.config.paths import find_paths
from localchat.documents.library import DocumentLibrary
from localchat.engine.request import Messages
from tests.documents.test_pages import docx, pdf
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.cli_questions import asked
from tests.support.terminal_screen import Call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "My Contracts"
    path.mkdir()
    (path / "lease.md").write_text("The lease ends in May.\n")
    (path / "scan.png").write_bytes(b"\x89PNG\0")
    return path


def test_a_folder_is_learned_listed_and_forgotten(call: Call, folder: Path) -> None:
    learned = call((), "learn", folder)
    assert learned.code == 0
    assert "@my-contracts: 1 file, about 5 tokens (1 read)" in learned.err
    assert "skipped 1 file, which is a PNG image" in learned.err
    assert "ask about it: localchat run lists models that can answer" in learned.err
    (entry,) = json.loads(call((), "learn", "--list", "--json").out)
    assert (entry["name"], entry["files"], entry["sources"]) == ("my-contracts", 1, [str(folder)])
    assert "@my-contracts" in call((), "learn").out
    assert call((), "learn", "--forget", "@my-contracts").code == 0
    assert json.loads(call((), "learn", "--list", "--json").out) == []
    assert call((), "learn", "--forget", "my-contracts").code == 2


def test_a_model_that_was_used_by_its_path_is_not_recommended_again(
    call: Call, folder: Path
) -> None:
    paths = find_paths(os.environ)
    paths.state_dir.mkdir(parents=True, exist_ok=True)
    (paths.state_dir / "last-model").write_text("/models/mine.gguf\n")
    assert 'ask about it: localchat "@' in call((), "learn", folder).err


def test_a_folder_without_a_single_readable_pdf_is_a_failure(call: Call, folder: Path) -> None:
    """A script that asks about contracts must not go on with the readme alone."""
    for name in ("a.pdf", "B.PDF"):
        (folder / name).write_bytes(b"%PDF-1.7 damaged")
    learned = call((), "learn", folder)
    assert learned.code == 1
    assert "none of the 2 PDF files could be read" in learned.err
    (folder / "c.pdf").write_bytes(pdf("The rent is 900."))
    learned = call((), "learn", folder)
    assert (learned.code, "none of the" in learned.err) == (0, False)


def test_files_without_text_are_not_learned(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.touch()
    learned = call((), "learn", file)
    assert (learned.code, "has no readable text" in learned.err) == (2, True)
    assert json.loads(call((), "learn", "--list", "--json").out) == []


def test_a_folder_is_learned_again_after_a_run_that_was_killed(call: Call, folder: Path) -> None:
    with DocumentLibrary(find_paths(os.environ).data_dir / "documents").open(
        "my-contracts", create=True
    ):
        pass
    assert call((), "learn", folder).code == 0


def test_a_damaged_collection_is_reported_beside_the_others(call: Call, folder: Path) -> None:
    for name in ("bad", "good"):
        call((), "learn", folder, "--name", name)
    (path,) = find_paths(os.environ).data_dir.rglob("bad.sqlite3")
    path.write_bytes(b"damaged" * 1000)
    listed = call((), "learn", "--list")
    assert listed.code == 1
    assert "@good" in listed.out and "@bad" not in listed.out
    assert "localchat learn --forget bad" in listed.err


def test_files_that_cannot_be_read_are_counted_with_the_reason(call: Call, folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}.pdf").write_bytes(pdf(""))
    learned = call((), "learn", folder)
    assert learned.code == 1
    assert "3 (has no text" in learned.err


def test_a_folder_with_names_that_are_not_utf8_is_learned_without_them(
    call: Call, tmp_path: Path
) -> None:
    for name in (b"lease\xff.txt", b"lease\xfe.txt", b"rent.txt"):
        (tmp_path / os.fsdecode(name)).write_text("The lease ends in May.")
    for _ in range(2):
        learned = call((), "learn", tmp_path, "--name", "lease")
        assert learned.code == 0
        assert "skipped 2 files, each of which has a name that is not UTF-8" in learned.err
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    refused = call((), "learn", folder, "--name", "other")
    assert refused.code == 2
    assert "whose name is not UTF-8 cannot be used here" in refused.err


def test_one_unreadable_file_is_named_with_the_reason(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf(""))
    learned = call((), "learn", path)
    assert learned.code == 2
    assert f"cannot read {path}: the file has no text" in learned.err


def test_home_folder_of_a_quoted_file_is_found(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes("Grüße".encode("utf-16-le"))
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "-f", "~/a.txt", "q").code == 0
    assert asked(app) == "Grüße\n\nq"


def test_a_folder_that_cannot_be_written_is_told_and_not_taken_for_a_missing_name(
    call: Call, folder: Path
) -> None:
    documents = find_paths({}).data_dir / "documents"
    documents.parent.mkdir(parents=True)
    documents.touch()
    learned = call((), "learn", folder)
    assert learned.code == 1
    assert "my-contracts.sqlite3 cannot be written: File exists" in learned.err


def test_a_url_is_refused_with_the_command_that_saves_its_page(call: Call) -> None:
    learned = call((), "learn", "https://example.org/a?b=c&d")
    assert learned.code == 2
    assert "curl -L 'https://example.org/a?b=c&d' > page.html" in learned.err


def test_one_token_is_told_in_the_singular(call: Call, folder: Path) -> None:
    (folder / "lease.md").write_text("May.\n")
    assert "1 file, about 1 token (1 read)" in call((), "learn", folder).err


def test_passages_stand_before_the_question_and_are_told(call: Call, folder: Path) -> None:
    for number in range(30):
        (folder / f"note{number}.txt").write_text(f"Note {number}. " + "It rains. " * 20)
    call((), "learn", folder, "--name", "home")
    app = ScriptedApp(SCENARIOS["hello"])
    outcome = call(app, "--stats", "@home When do leases end?")
    assert "localchat: @home: 1 passage: lease.md:1\n" in outcome.err
    assert "[lease.md:1]\nThe lease ends in May.\n" in asked(app)
    assert asked(app).endswith("\n\nWhen do leases end?")
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "@home", "and this?", stdin=b"a piped text")
    assert asked(app).endswith("\n\na piped text\n\nand this?")
    assert asked(app).startswith("Passages from the documents home: ")
    assert "[lease.md:1]" in asked(app)
    assert "@home" not in asked(app)


def test_what_fits_is_sent_whole_and_quiet_pipes_stay_quiet(call: Call, folder: Path) -> None:
    call((), "learn", folder, "--name", "home")
    first, second = ScriptedApp(SCENARIOS["hello"]), ScriptedApp(SCENARIOS["hello"])
    assert "@home" not in call(first, "what ends? @home").err
    call(second, "@home", "another?")
    assert asked(first).startswith("Documents: home. ")
    assert "[lease.md:1]\nThe lease ends in May.\n" in asked(first)
    assert asked(first).removesuffix("what ends?") == asked(second).removesuffix("another?")


def test_a_second_question_of_a_conversation_does_not_repeat_them(call: Call, folder: Path) -> None:
    call((), "learn", folder, "--name", "home")
    call(SCENARIOS["hello"], "@home when?")
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "-c", "@home and where?").code == 0
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    assert prompt.messages[-1].content == "and where?"
    assert prompt.messages[0].content.count("The lease ends in May.") == 1


def test_an_unknown_name_before_a_question_is_an_error(call: Call, folder: Path) -> None:
    call((), "learn", folder, "--name", "home")
    refused = call(SCENARIOS["hello"], "@hom when?")
    assert (refused.code, "there are no documents @hom; did you mean @home?" in refused.err) == (
        2,
        True,
    )
    for question in ("@other when?", "@other: when?", "@other, when?", " @other when?"):
        refused = call(SCENARIOS["hello"], question)
        assert (refused.code, "there are no documents @other" in refused.err) == (2, True)
    for text in ("@other.org is what?", "@cache(8)\ndef f(): ...", "@other:\nx", "Ask @other why"):
        assert call(SCENARIOS["hello"], text).code == 0
    assert call(SCENARIOS["hello"], "--", "@hom when?").code == 0


def test_a_file_after_the_sign_is_included_although_documents_have_such_names(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "Makefile").write_text("all:")
    for name in ("lease.md", "Makefile"):
        asked = call(SCENARIOS["hello"], f"@{name} when?")
        assert asked.code == 0
        assert f"{name} is attached" in asked.err


def test_other_documents_need_a_name_of_their_own(call: Call, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "my-contracts"
    other.mkdir(parents=True)
    (other / "b.md").write_text("more")
    call((), "learn", folder)
    assert "@my-contracts contains other documents" in call((), "learn", other).err
    assert "2 files" in call((), "learn", other, "--name", "my-contracts").err
    assert "(0 read, 3 unchanged)" in call((), "learn", "--name", "my-contracts").err


@pytest.mark.parametrize("args", [("nothing",), ("--name", "new"), ("empty",)])
def test_what_cannot_be_learned_leaves_no_name(
    call: Call, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert call((), "learn", *args).code in (2, 3)
    assert json.loads(call((), "learn", "--list", "--json").out) == []


def test_a_mention_alone_and_behind_dashes(call: Call, folder: Path) -> None:
    call((), "learn", folder, "--name", "home")
    assert "@home needs a question" in call(SCENARIOS["hello"], "@home").err
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "--", "@home what?")
    assert asked(app) == "@home what?"


def test_files_of_a_prompt_may_be_docx_html_and_pdf(call: Call, tmp_path: Path) -> None:
    word, page, book = tmp_path / "a.docx", tmp_path / "a.html", tmp_path / "a.pdf"
    word.write_bytes(
        docx('<w:p><w:t>One</w:t></w:p><w:p><w:br w:type="page"/><w:t>Two</w:t></w:p>')
    )
    page.write_text("<p>Hello <b>you</b>")
    book.write_bytes(pdf("Text."))
    texts = {word: "[page 1]\nOne\n\n[page 2]\nTwo", page: "Hello you", book: "Text."}
    for file, text in texts.items():
        app = ScriptedApp(SCENARIOS["hello"])
        assert call(app, "-f", file, "q").code == 0
        assert asked(app) == f"{text}\n\nq"


def test_names_are_completed(call: Call, folder: Path) -> None:
    call((), "learn", folder, "--name", "home")
    context = click.Context(click.Command("x"), obj=ScriptedApp(()).app)
    items = complete_documents(context, click.Argument(["name"]), "@h", sign="@")
    assert [item.value for item in items] == ["@home"]


def test_in_the_line_mode_what_was_taken_is_told(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call((), "learn", folder, "--name", "home")
    lines = iter(("@home when?", "and where?"))

    class Keys:
        def read(self) -> str | None:
            return next(lines, None)

    monkeypatch.setattr("localchat.cli.chat.line_input.open_keyboard", lambda terminal: Keys())
    app = ScriptedApp(SCENARIOS["hello"])
    outcome = call(app, "-i")
    first, second = app.engines[0].requests
    assert isinstance(first.prompt, Messages)
    assert isinstance(second.prompt, Messages)
    assert first.prompt.messages[-1].content.startswith("Documents: home. ")
    assert second.prompt.messages[0] == first.prompt.messages[-1]
    assert second.prompt.messages[-1].content == "and where?"
    assert outcome.err.count("localchat: @home: 1 file") == 1


def test_documents_that_cannot_be_read_do_not_end_the_line_mode(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call((), "learn", folder, "--name", "home")
    (find_paths({}).data_dir / "documents" / "home.sqlite3").write_bytes(b"broken" * 1000)
    lines = iter(("@home when?", "hello"))

    class Keys:
        def read(self) -> str | None:
            return next(lines, None)

    monkeypatch.setattr("localchat.cli.chat.line_input.open_keyboard", lambda terminal: Keys())
    app = ScriptedApp(SCENARIOS["hello"])
    outcome = call(app, "-i")
    assert "the documents @home cannot be used" in outcome.err
    assert asked(app) == "hello"
