"""Notices of an engine process: those about the load stay in its description."""

import io

from localchat.core.process import FrameSender
from localchat.engine.local import protocol


def test_only_notices_about_the_load_are_stored() -> None:
    sink = io.BytesIO()
    sender = FrameSender(sink)
    sender.notify("The context is shorter.")
    sender.announce("Slower than usual: other programs are using the CPU.")
    assert sender.notes == ["The context is shorter."]
    sink.seek(0)
    frames = list(protocol.read_frames(sink, protocol.FromChild))
    assert [type(frame) for frame in frames] == [protocol.Notice] * 2
