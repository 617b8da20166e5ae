"""The prompt is made of stdin, files and words; broken input is refused."""

import re
from pathlib import Path

import pytest

from localchat.cli.chat import prompt
from localchat.cli.chat.prompt import join_parts
from localchat.engine.request import Messages
from localchat.errors import UsageError
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.cli_questions import asked, asked_message
from tests.support.media import HOSTILE, png, wav
from tests.support.terminal_screen import Call

HELLO = SCENARIOS["hello"]
BINARY = (b"\x7fELF\0\0", b"\xff\xfea\0\0\0", b"\xff\xfe\0")


def sent(call: Call, *args: str | Path, stdin: bytes = b"") -> str:
    app = ScriptedApp(HELLO)
    assert call(app, *args, stdin=stdin).code == 0
    return asked(app)


def test_pictures_and_recordings_come_before_the_text(call: Call, tmp_path: Path) -> None:
    chart, sound, text = tmp_path / "chart.txt", tmp_path / "a.wav", tmp_path / "b.txt"
    chart.write_bytes(png())
    sound.write_bytes(wav(0.1))
    text.write_text("1\n")
    app = ScriptedApp(HELLO)
    files = ("-f", chart, "-f", text, "-f", sound)
    assert call(app, *files, "What is odd here?", stdin=png(9, 9)).code == 0
    message = asked_message(app)
    assert message.content == "1\n\nWhat is odd here?"
    assert [(item.kind, item.name, item.position) for item in message.attachments] == [
        ("image", "chart.txt", 0),
        ("audio", "a.wav", 0),
        ("image", "stdin", 0),
    ]
    assert message.attachments[0].data == png()


def test_files_that_the_words_name_come_before_them(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("1\n")
    Path("b.txt").write_text("2\n")
    assert sent(call, "What is in @a.txt?") == "a.txt:\n\n1\n\nWhat is in @a.txt?"
    both = "0\n\na.txt:\n\n1\n\n./b.txt:\n\n2\n\n@a.txt and @./b.txt"
    assert sent(call, "@a.txt", "and", "@./b.txt", stdin=b"0\n") == both
    for words in ("me@a.txt", "@@a.txt", "see a.txt", "a @dataclass", "a @a.txt.orig"):
        assert sent(call, words) == words
    Path("c d.txt").write_text("3\n")
    for words in ('Sum up @"c d.txt".', "Sum up @'c d.txt'", "Sum up @c\\ d.txt"):
        assert sent(call, words) == f"c d.txt:\n\n3\n\n{words}"
    assert 'there is no file "e f.txt"' in call(HELLO, 'Sum up @"e f.txt"').err
    assert sent(call, "--", "@a.txt") == "@a.txt"
    lines = "Review:\n+ @a.txt"
    assert sent(call, lines) == lines, "the output of a command chooses no files"
    missing = call(ScriptedApp(HELLO), "Explain @c.txt.")
    assert missing.code == 0
    assert "there is no file c.txt, so the name is sent as text" in missing.err


def test_a_deleted_folder_stops_no_question_and_is_named_in_errors(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert sent(call, "Ask @me") == "Ask @me"
    assert "there is no file x.txt" in call(HELLO, "Ask @x.txt").err
    learned = call((), "learn", ".")
    assert (learned.code, "the current folder was deleted" in learned.err) == (2, True)


def test_a_picture_of_an_earlier_question_is_left_out_for_a_model_that_cannot_see_it(
    call: Call,
) -> None:
    assert call(HELLO, "what?", stdin=png()).code == 0
    app = ScriptedApp((UsageError("this model cannot see pictures", media_kind="image"),))
    refused = call(app, "-c", "and now?")
    assert (refused.code, "earlier questions, so they are not sent" in refused.err) == (2, True)
    first, second = (request.prompt for request in app.engines[0].requests)
    assert isinstance(first, Messages) and isinstance(second, Messages)
    assert first.messages[0].attachments
    assert not any(message.attachments for message in second.messages)


def test_a_picture_alone_is_a_prompt(call: Call) -> None:
    app = ScriptedApp(HELLO)
    assert call(app, stdin=png()).code == 0
    assert len(asked_message(app).attachments) == 1


def test_named_pictures_are_attached_unless_after_dashes(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chart.png", "two words.png"):
        (tmp_path / name).write_bytes(png())
    for args in (
        ("What is it?", "chart.png"),
        ("What is it?", "two words.png"),
        ("What is it? ./chart.png",),
        ('What is it? @"two words.png"',),
        (f"{tmp_path}/chart.png What is it?",),
    ):
        app = ScriptedApp(HELLO)
        code, _, err = call(app, *args)
        assert code == 0 and ".png is attached" in err, args
        assert asked_message(app).content == "What is it?"
        assert len(asked_message(app).attachments) == 1
    for plain in (["--", "What is it?", "chart.png"], ["Write code that reads chart.png"]):
        app = ScriptedApp(HELLO)
        assert call(app, *plain).code == 0
        assert asked_message(app).attachments == ()


@pytest.mark.parametrize("case", ["cut in the header", "1 x 100,000", "bomb of 4 billion pixels"])
def test_hostile_pictures_are_refused(call: Call, tmp_path: Path, case: str) -> None:
    data, sentence = HOSTILE[case]
    file = tmp_path / "a.png"
    file.write_bytes(data)
    for code, out, err in (call(HELLO, "-f", file, "q"), call(HELLO, "q", stdin=data)):
        assert (code, out) == (2, "")
        assert re.search(sentence, err)


def test_the_source_of_a_drawing_is_sent_with_a_notice(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    file.write_text("<svg><circle r='3'/></svg>")
    app = ScriptedApp(HELLO)
    done = call(app, "-f", file, "What is it?")
    assert "is an SVG drawing: its source is sent as text" in done.err
    assert "circle" in asked(app)


def test_a_raw_prompt_has_no_pictures(call: Call) -> None:
    code, _, err = call(HELLO, "--raw-prompt", "q", stdin=png())
    assert code == 2 and "--raw-prompt sends text only" in err


def test_stdin_comes_first_then_a_blank_line_then_the_prompt(call: Call) -> None:
    assert sent(call, "question?", stdin=b"a file\n") == "a file\n\nquestion?"


def test_stdin_alone_is_the_prompt(call: Call) -> None:
    assert sent(call, stdin="grüße\r\n".encode()) == "grüße"
    assert sent(call, "-", stdin=b"text") == "text"
    assert sent(call, "--", "-", stdin=b"text") == "text\n\n-"


@pytest.mark.parametrize("stdin", [b"", b"\n", b" \n\t"])
def test_empty_stdin_is_no_stdin(call: Call, stdin: bytes) -> None:
    assert sent(call, "hi", stdin=stdin) == "hi"
    assert call(HELLO, stdin=stdin).code == 2


def test_one_file_is_the_beginning_and_several_are_named(call: Call, tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("1\n")
    two.write_text("2\n")
    assert sent(call, "-f", one, "q", stdin=b"in") == "1\n\nin\n\nq"
    assert sent(call, "-f", one) == "1"
    assert sent(call, "-f", one, "-f", two, "q") == f"{one}:\n\n1\n\n{two}:\n\n2\n\nq"


def test_a_file_that_is_no_text_is_refused(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    for data in BINARY:
        file.write_bytes(data)
        code, out, err = call(HELLO, "-f", file, "explain")
        assert (code, out) == (2, "")
        assert f"{file} is a" in err


def test_binary_stdin_is_refused(call: Call) -> None:
    for data in BINARY:
        code, out, err = call(HELLO, "explain", stdin=data)
        assert (code, out) == (2, "")
        assert "stdin is a" in err


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_the_text_of_windows_is_read_by_its_mark(call: Call, tmp_path: Path, encoding: str) -> None:
    data = "".join(("\ufeff" if encoding == "utf-16-be" else "", "Grüße\r\nnotes")).encode(encoding)
    file = tmp_path / "notes.txt"
    file.write_bytes(data)
    assert sent(call, "-f", file, "q") == "Grüße\nnotes\n\nq"
    assert sent(call, "q", stdin=data) == "Grüße\nnotes\n\nq"


def test_an_empty_file_is_named(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    assert f"{file} is empty" in call(HELLO, "-f", file, "q").err


def test_ten_megabytes_arrive_whole(call: Call) -> None:
    text = "0123456789abcdef" * (10 * 2**16)
    assert sent(call, "q", stdin=text.encode()) == f"{text}\n\nq"


def test_more_than_is_read_ends_with_6_and_the_limit(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "MAX_INPUT_BYTES", 1000)
    code, out, err = call(HELLO, "q", stdin=b"x" * 1001)
    assert (code, out) == (6, "")
    assert "1,000 bytes" in err


def test_bytes_that_are_not_utf8_are_replaced_and_said(call: Call) -> None:
    app = ScriptedApp(HELLO)
    code, _, err = call(app, "q", stdin=b"ok \xff\xfe end")
    assert code == 0
    assert asked(app) == "ok \ufffd\ufffd end\n\nq"
    assert "stdin is not UTF-8 (first at byte 3)" in err
    assert "not UTF-8" not in call(HELLO, "q", stdin="a real \ufffd".encode()).err


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["-f", "nope.txt", "q"], 3, "nope.txt"),
        (["-f", ".", "q"], 2, "folder"),
        (["-m", "nope.gguf", "q"], 3, "nope.gguf"),
        (["-m", "qwen2.5:7b", "q"], 3, "qwen2.5:7b"),
        (["-m", ".", "q"], 2, "folder"),
        (["run", "./nowhere", "q"], 3, "nowhere"),
    ],
)
def test_what_is_not_there_is_named(call: Call, args: list[str], code: int, told: str) -> None:
    got, out, err = call(HELLO, *args)
    assert (got, out) == (code, "")
    assert told in err


def test_a_folder_tells_which_models_it_holds(call: Call, model: Path) -> None:
    assert "tiny.gguf" in call(HELLO, "run", model.parent, "q").err


def test_a_name_is_found_in_the_models_folder(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_MODELS", str(model.parent))
    app = ScriptedApp(HELLO)
    assert call(app, "run", "tiny", "hi").code == 0
    assert app.options[0].model == model


def test_without_any_model_it_ends_with_3_and_says_what_to_do(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.models.resolve._guide_file", lambda: Path("/nowhere/guide.gguf"))
    code, out, err = call(HELLO, "hi", named=False)
    assert (code, out) == (3, "")
    assert "LOCALCHAT_MODEL" in err
    assert call(HELLO, "run", "guide", "hi", named=False).code == 3


def test_conversation_needs_a_terminal_and_one_kind_of_output(call: Call) -> None:
    assert call(HELLO, "-i", "--json", "hi").code == 2


def test_parts_are_joined_by_blank_lines_and_empty_ones_left_out() -> None:
    assert join_parts(["a\n\n", "", "b"]) == "a\n\nb"
    assert join_parts(["", ""]) == ""
    assert join_parts(["", "b\n"]) == "b\n"


def test_words_that_are_no_unicode_are_replaced_and_said(call: Call) -> None:
    app = ScriptedApp(HELLO)
    code, _, err = call(app, "caf\udce9 hi")
    assert (code, asked(app)) == (0, "caf\ufffd hi")
    assert "the prompt is not UTF-8" in err


def test_a_dash_is_no_file_and_stdin_needs_none(call: Call) -> None:
    refused = call(SCENARIOS["hello"], "-f", "-", "hi", stdin=b"text")
    assert refused.code == 3
    assert "stdin needs no flag" in refused.err
