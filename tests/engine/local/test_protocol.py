"""Frames of the engine process."""

import io

import msgspec

from localchat.engine.events import ToolCall
from localchat.engine.local.protocol import (
    Events,
    Failed,
    FrameWriter,
    FromChild,
    TextReply,
    read_frames,
)
from localchat.errors import ModelInvalid


def test_an_error_about_a_name_that_is_not_unicode_can_be_sent() -> None:
    name = "\udcff.gguf"
    error = ModelInvalid(f"{name} is empty", hint=f"delete {name}", path=name, size=0)
    frame = msgspec.msgpack.decode(msgspec.msgpack.encode(Failed.of(1, error)), type=Failed)
    assert frame.error().message == "?.gguf is empty"
    assert frame.error().details == {"path": "?.gguf", "size": 0}


def test_texts_that_are_not_unicode_are_replaced_in_every_frame() -> None:
    sink = io.BytesIO()
    writer = FrameWriter(sink)
    call = ToolCall(0, 1, "id", "f\ud800", "{}")
    for frame in (Events(((7, call),)), TextReply(3, "a\udfff")):
        writer.write(frame)
    frames = read_frames(io.BufferedReader(io.BytesIO(sink.getvalue())), FromChild)
    assert list(frames) == [Events(((7, ToolCall(0, 1, "id", "f?", "{}")),)), TextReply(3, "a?")]
