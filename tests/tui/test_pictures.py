"""Pictures in the composer and in the conversation."""

import os
import stat
from functools import partial
from pathlib import Path

import PIL.Image
import pytest
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot

from localchat.engine.request import Attachment, Message, Messages
from localchat.errors import UsageError
from localchat.session.blocks import UserBlock
from localchat.tui.attachments import attachment_of_file, attachment_of_media, contract, expand
from localchat.tui.clipboard import clipboard_picture
from localchat.tui.pictures.painter import PicturePainter, decode
from localchat.tui.pictures.protocol import CellSize, picture_protocol
from localchat.tui.pictures.rows import (
    MAX_COLUMNS,
    MAX_ROWS,
    block_rows,
    kitty_rows,
    kitty_transmission,
    picture_size,
    sixel_rows,
)
from localchat.tui.transcript.block_rows import block_rows as rows_of
from localchat.tui.transcript.strips import Palette, StripRenderer
from localchat.tui.widgets.composer import Composer
from tests.support.media import HOSTILE, encoded, png, wav
from tests.support.tui_stage import Stage, app_of, play, until

CELL = CellSize(10, 20)


def gradient(width: int = 200, height: int = 120) -> PIL.Image.Image:
    red = PIL.Image.linear_gradient("L").resize((width, height))
    return PIL.Image.merge("RGB", (red, red.rotate(180), PIL.Image.new("L", red.size, 90)))


def message_of(stage: Stage, number: int = -1) -> Message:
    prompt = stage.engine.requests[number].prompt
    assert isinstance(prompt, Messages)
    return prompt.messages[-1]


def test_a_mentioned_picture_is_sent_at_its_place(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "cat.png").write_bytes(png(64, 48))

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.root = tmp_path
        await pilot.press(*"in @cat.png now")
        await until(pilot, lambda: "⟦Image: cat.png 64x48⟧" in app.chat.composer.text)
        await pilot.press("enter")
        await until(pilot, lambda: stage.engine.requests)
        message = message_of(stage)
        assert message.content == "in  now"
        assert message.attachments == (Attachment("image", png(64, 48), 3, "cat.png"),)
        block = app.chat.transcript.blocks[0]
        assert isinstance(block, UserBlock) and block.attachments == message.attachments

        def captions() -> str:
            layout = app.chat.transcript._block_layout
            return "\n".join(row.text for row in layout.rows(0).rows)

        await until(pilot, lambda: "▣ cat.png  64x48" in captions())

    play(stage, steps)


def has_attachments(composer: Composer, count: int) -> bool:
    return len(composer.attachments) == count


def test_dropped_files_become_signs_and_backspace_removes_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    plain, spaced = tmp_path / "a.png", tmp_path / "two words.wav"
    plain.write_bytes(png())
    spaced.write_bytes(wav(1.0))

    async def steps(pilot: Pilot[int]) -> None:
        composer = app_of(pilot).chat.composer
        for paste, count in (
            (f"'{spaced}' {plain} ", 2),
            (str(spaced), 1),
            (f"file://{plain}", 1),
        ):
            composer.write("")
            composer.editor.post_message(events.Paste(paste))
            await until(pilot, partial(has_attachments, composer, count))
        assert composer.attachments[0].label == "Image: a.png 6x4"
        await pilot.press("backspace", "backspace")
        assert composer.text == ""
        composer.editor.post_message(events.Paste(f"{plain} and text"))
        await until(pilot, lambda: composer.text == f"{plain} and text")

    play(stage, steps)


def clipboard_tool(folder: Path, name: str, output: bytes) -> None:
    (folder / "picture").write_bytes(output)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\ncat '{folder}/picture'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_control_v_pastes_the_picture_of_the_clipboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.delenv("DISPLAY", raising=False)
    clipboard_tool(tmp_path, "wl-paste", png(9, 9))
    stage = Stage(tmp_path)

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("ctrl+v")
        await until(pilot, lambda: "⟦Image: clipboard.png 9x9⟧" in app.chat.composer.text)
        (tmp_path / "picture").write_bytes(b"")
        app._clipboard = "cut text"
        app.chat.composer.write("")
        await pilot.press("ctrl+v")
        await until(pilot, lambda: app.chat.composer.text == "cut text")

    play(stage, steps)


def test_the_clipboard_needs_a_tool_of_the_desktop(tmp_path: Path) -> None:
    assert clipboard_picture({}) is None
    assert clipboard_picture({"DISPLAY": ":0"}) is None


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-ghostty", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "sixel"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "sixel"),
        ({"TERM": "xterm-256color", "WT_SESSION": "1"}, "sixel"),
        ({"TERM": "xterm-256color"}, "blocks"),
        ({"TERM": "tmux-256color", "TMUX": "1", "KITTY_WINDOW_ID": "1"}, "blocks"),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, "off"),
        ({"TERM": "dumb"}, "off"),
        ({"TERM": "linux"}, "off"),
        ({}, "off"),
    ],
)
def test_the_terminal_decides_about_the_protocol(environ: dict[str, str], protocol: str) -> None:
    assert picture_protocol("auto", environ) == protocol
    assert picture_protocol("auto", environ, color=False) == "off"
    assert picture_protocol("sixel", environ) == "sixel"


def test_sizes_keep_the_shape_and_small_pictures_stay_small() -> None:
    assert picture_size(20, 20, 80, CELL) == (2, 1)
    assert picture_size(4000, 3000, 200, CELL) == (48, MAX_ROWS)
    assert picture_size(4000, 400, 200, CELL).columns == MAX_COLUMNS
    assert picture_size(4000, 3000, 36, CELL) == (36, 14)
    assert picture_size(1, 200, 80, CELL) == (1, 10)


def test_half_blocks_have_two_pixels_a_cell() -> None:
    picture = PIL.Image.new("RGB", (2, 2), (255, 0, 0))
    picture.paste((0, 0, 255), (0, 1, 2, 2))
    (row,) = block_rows(picture, picture_size(20, 20, 80, CELL))
    (cells,) = row
    assert cells == ("▀▀", (255, 0, 0), (0, 0, 255), False)


def test_kitty_placeholders_take_a_cell_each_and_name_their_picture() -> None:
    size = picture_size(200, 120, 80, CELL)
    rows = kitty_rows(0x010203, size)
    assert len(rows) == size.rows
    for (cells,) in rows:
        assert cell_len(cells.text) == size.columns
        assert cells.color == (1, 2, 3)
    sequence = kitty_transmission(gradient(), 0x010203, size, CELL)
    chunks = sequence.removesuffix("\x1b\\").split("\x1b\\")
    assert chunks[0].startswith("\x1b_Ga=T,U=1,q=2,f=100,i=66051,c=20,r=6,")
    assert all(len(chunk) < 4200 for chunk in chunks)
    assert [chunk.partition(";")[0][-1] for chunk in chunks] == ["1"] * (len(chunks) - 1) + ["0"]


def test_sixels_decode_to_the_picture() -> None:
    size = picture_size(200, 120, 80, CELL)
    rows = sixel_rows(gradient(), size, CELL)
    assert len(rows) == 6
    for number, (blank, control) in enumerate(rows):
        assert blank.text == " " * 20 and control.is_control
        assert control.text.startswith("\x1b7\x1b[20D\x1bP0;1q") and control.text.endswith("\x1b8")
        shown = decoded_sixels(control.text)
        expected = gradient().crop((0, 20 * number, 200, 20 * number + 20))
        difference = [abs(a - b) for a, b in zip(shown.tobytes(), expected.tobytes(), strict=True)]
        assert sum(difference) / len(difference) < 8


def decoded_sixels(sequence: str) -> PIL.Image.Image:
    """Decode sixels as a terminal does."""
    body = sequence.partition('q"1;1;')[2].partition("\x1b\\")[0]
    width, _, body = body.partition(";")
    digits = body[: len(body) - len(body.lstrip("0123456789"))]
    picture = PIL.Image.new("RGB", (int(width), int(digits)))
    colors: dict[int, tuple[int, int, int]] = {}
    current = x = y = 0
    position = len(digits)
    while position < len(body):
        sign = body[position]
        end = position + 1
        while end < len(body) and body[end] in "0123456789;":
            end += 1
        numbers = [int(number) for number in body[position + 1 : end].split(";") if number]
        match sign:
            case "#" if len(numbers) == 5:
                colors[numbers[0]] = tuple(part * 255 // 100 for part in numbers[2:])  # type: ignore[assignment]
            case "#":
                current = numbers[0]
            case "$":
                x = 0
            case "-":
                x, y = 0, y + 6
            case _:
                count = 1
                if sign == "!":
                    count, sign, end = numbers[0], body[end], end + 1
                for column in range(x, x + count):
                    for bit in range(6):
                        if ord(sign) - 63 >> bit & 1:
                            picture.putpixel((column, y + bit), colors[current])
                x += count
        position = end
    return picture


@pytest.mark.parametrize("protocol", ["kitty", "sixel", "blocks", "off"])
@pytest.mark.parametrize("width", [100, 40])
def test_rows_of_every_protocol_fill_the_strip(protocol: str, width: int) -> None:
    written: list[str] = []
    painter = PicturePainter(protocol, CELL, written.append)  # type: ignore[arg-type]
    attachment = Attachment("image", encoded(gradient(800, 500)), 0, "chart.png")
    block = UserBlock("q", "What is odd?", attachments=(attachment,))
    first = rows_of(block, width, is_open=False, painter=painter).rows
    assert any("▣ chart.png" in row.text for row in first)
    assert painter.wanted == [attachment]
    painter.put(attachment, decode(attachment))
    rows = rows_of(block, width, is_open=False, painter=painter).rows
    assert sum(bool(row.picture) for row in rows) == {
        "off": 0,
        100: 18,
        40: 11,
    }.get(protocol if protocol == "off" else width, 0)
    assert rows[-1].text == "▌ ▣ chart.png  800x500"
    renderer = StripRenderer(Palette({}), width, width - 2)
    for row in rows:
        strip = renderer.strip(row)
        assert strip.cell_length == width
        assert sum(segment.cell_length for segment in strip) == width
    assert bool(written) == (protocol == "kitty")
    painter.close()
    if protocol == "kitty":
        assert written[-1].startswith("\x1b_Ga=d,d=I,")


def test_recordings_and_damaged_pictures_have_a_description() -> None:
    painter = PicturePainter("blocks", CELL)
    for attachment, caption in (
        (Attachment("audio", wav(65.0), 0, "a.wav"), "♪ a.wav  1:05"),
        (
            Attachment("image", encoded(gradient())[:-100], 0, "b.png"),
            "▣ b.png  b.png is damaged or incomplete",
        ),
    ):
        painter.put(attachment, decode(attachment))
        assert painter.draw(attachment, 60) == (caption, ())


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_or_described(tmp_path: Path, case: str) -> None:
    data, _ = HOSTILE[case]
    path = tmp_path / "it.png"
    path.write_bytes(data)
    # Texts are sent as text, and the pixels of a picture are not read yet.
    if case not in ("empty", "text", "svg", "truncated png", "tiles of the same bytes"):
        with pytest.raises(UsageError, match=r"it\.png "):
            attachment_of_file(path, "it.png")
    shown = decode(Attachment("image", data, name="it.png"))
    assert shown.picture is None and shown.label.startswith("it.png ")


def test_a_picture_inside_a_text_has_a_chip_at_its_place() -> None:
    inner = Attachment("image", png(), 3, "a.png")
    block = UserBlock("q", "in  now", attachments=(inner, Attachment("audio", wav(), 7, "b.wav")))
    rows = [row.text for row in rows_of(block, 80, is_open=False).rows]
    assert rows[1:] == ["▌ in  ▣ a.png  now", "▌ ▣ a.png", "▌ ♪ b.wav"]


def test_a_sent_question_returns_to_the_editor_with_its_pictures() -> None:
    media = Attachment("image", png(), 0, "a.png")
    sign = attachment_of_media(media)
    text = f"one {sign.sign} two"
    question = expand(text, (sign,))
    assert question.text == "one  two" and question.attachments[0].position == 4
    written = contract(question)
    assert written.text == text
    assert expand(*written) == question
