"""Frames of the engine process."""

import msgspec

from localchat.engine.local.protocol import Failed
from localchat.errors import ModelInvalid


def test_an_error_about_a_name_that_is_not_unicode_can_be_sent() -> None:
    name = "\udcff.gguf"
    error = ModelInvalid(f"{name} is empty", hint=f"delete {name}", path=name, size=0)
    frame = msgspec.msgpack.decode(msgspec.msgpack.encode(Failed.of(1, error)), type=Failed)
    assert frame.error().message == "?.gguf is empty"
    assert frame.error().details == {"path": "?.gguf", "size": 0}
