"""Compressed bodies: read within their limit, and refused in words where they are not what they claim."""

import gzip
import importlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localchat.server.config import ServerConfig, ServerLimits
from localchat.server.errors import ApiError
from localchat.server.request_body import DECOMPRESSORS, decompress
from tests.support.http_server import Reply, Stage, ask, serving

ASKED = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
MOST = 100_000


def _zstd(data: bytes) -> bytes:
    module: Any = importlib.import_module("backports.zstd")
    packed: bytes = module.compress(data)
    return packed


_WITH_ZSTD = pytest.mark.skipif("zstd" not in DECOMPRESSORS, reason="no zstd library is installed")
PACKERS = [
    pytest.param("gzip", gzip.compress, id="gzip"),
    pytest.param("zstd", _zstd, id="zstd", marks=_WITH_ZSTD),
]
Packer = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def small() -> Iterator[Stage]:
    """A server whose limit is small."""
    with serving(ServerConfig(limits=ServerLimits(media_body_bytes=MOST))) as stage:
        yield stage


def send(stage: Stage, body: bytes, encoding: str) -> Reply:
    return ask(stage, "/v1/chat/completions", body, headers={"content-encoding": encoding})


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_a_compressed_body_is_read(small: Stage, name: str, pack: Packer) -> None:
    assert send(small, pack(ASKED), name).status == 200
    assert send(small, pack(ASKED), f" {name.upper()} , identity").status == 200


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_a_bomb_is_refused_at_the_limit(small: Stage, name: str, pack: Packer) -> None:
    reply = send(small, pack(b" " * 50_000_000), name)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert str(MOST) in reply.error["message"]
    fits = ASKED + b" " * (MOST - len(ASKED))
    assert send(small, pack(fits), name).status == 200
    assert send(small, pack(fits + b" "), name).status == 413


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_what_cannot_be_read_is_refused(small: Stage, name: str, pack: Packer) -> None:
    noise = random.Random(7).randbytes(64)
    for broken in (pack(ASKED)[:-9], b"no such thing", b"\x00\x01", pack(ASKED) + noise):
        reply = send(small, broken, name)
        assert (reply.status, reply.error["code"]) == (400, "invalid_json"), broken


@pytest.mark.parametrize(
    "encoding", ["br", "deflate", "x-gzip", "gzip, gzip", "compress", "gzip;q=1"]
)
def test_refusal_of_an_unknown_encoding_lists_the_supported_ones(
    small: Stage, encoding: str
) -> None:
    reply = send(small, gzip.compress(ASKED), encoding)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert reply.headers["accept-encoding"] == ", ".join(DECOMPRESSORS)
    assert "gzip" in reply.error["message"]


def test_without_its_library_zstd_is_refused_with_the_list(
    small: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {name: make for name, make in DECOMPRESSORS.items() if name != "zstd"}
    monkeypatch.setattr("localchat.server.request_body.DECOMPRESSORS", left)
    reply = send(small, b"\x28\xb5\x2f\xfd", "zstd")
    assert reply.status == 415
    assert reply.headers["accept-encoding"] == "gzip"


@_WITH_ZSTD
def test_a_frame_of_zstd_that_asks_for_a_great_window_is_refused() -> None:
    module: Any = importlib.import_module("backports.zstd")
    options = {
        module.CompressionParameter.window_log: 27,
        module.CompressionParameter.content_size_flag: 0,
    }
    packer = module.ZstdCompressor(options=options)
    packed = packer.compress(ASKED) + packer.flush()
    with pytest.raises(ApiError, match="cannot be read"):
        decompress(packed, "zstd", MOST)


def test_a_plain_body_is_left_as_it_is() -> None:
    assert decompress(ASKED, "", MOST) == decompress(ASKED, "identity", MOST) == ASKED


def test_the_limit_is_twenty_mebibytes() -> None:
    assert ServerLimits().unpacked_bytes == 20 << 20
