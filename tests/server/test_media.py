"""Pictures and recordings of every protocol reach the engine, and hostile ones are refused with a sentence."""

import base64
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localchat.engine.request import Attachment, Message
from localchat.server.config import ServerConfig, ServerLimits
from tests.support.http_server import UNHURRIED, Stage, ask, serving
from tests.support.media import HOSTILE, png, wav

PICTURE = png(6, 4)
SOUND = wav(0.1)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64(data)}"


def image(position: int = 0, data: bytes = PICTURE, name: str = "") -> Attachment:
    return Attachment("image", data, position, name)


def openai(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def responses(*parts: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def anthropic(*blocks: object) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": list(blocks)}]}


def block(source: object) -> dict[str, Any]:
    return {"type": "image", "source": source}


TEXT = {"type": "text", "text": "What is odd here?"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        pytest.param(
            CHAT,
            openai({"type": "image_url", "image_url": {"url": data_url(PICTURE)}}, TEXT),
            Message("user", TEXT["text"], attachments=(image(),)),
            id="openai",
        ),
        pytest.param(
            CHAT,
            openai(TEXT, {"type": "image_url", "image_url": data_url(PICTURE, "text/plain")}, TEXT),
            Message("user", TEXT["text"] * 2, attachments=(image(17),)),
            id="openai-between-texts",
        ),
        pytest.param(
            CHAT,
            openai(
                TEXT, {"type": "input_audio", "input_audio": {"data": b64(SOUND), "format": "wav"}}
            ),
            Message("user", TEXT["text"], attachments=(Attachment("audio", SOUND, 17),)),
            id="openai-audio",
        ),
        pytest.param(
            CHAT,
            openai(
                {
                    "type": "file",
                    "file": {
                        "filename": "a.txt",
                        "file_data": data_url(b"hello\n", "text/plain"),
                    },
                },
                TEXT,
            ),
            Message("user", f"a.txt:\n```\nhello\n```\n{TEXT['text']}"),
            id="openai-text-file",
        ),
        pytest.param(
            "/v1/responses",
            responses(
                {"type": "input_text", "text": "What?"},
                {"type": "input_image", "image_url": data_url(PICTURE), "detail": "low"},
                {"type": "input_file", "filename": "b.png", "file_data": data_url(PICTURE)},
            ),
            Message("user", "What?", attachments=(image(5), image(5, name="b.png"))),
            id="responses",
        ),
        pytest.param(
            "/v1/messages",
            anthropic(
                block({"type": "base64", "media_type": "image/png", "data": b64(PICTURE)}), TEXT
            ),
            Message("user", TEXT["text"], attachments=(image(),)),
            id="anthropic",
        ),
        pytest.param(
            "/api/chat",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "What?", "images": [b64(PICTURE)]}],
            },
            Message("user", "What?", attachments=(image(),)),
            id="ollama-chat",
        ),
        pytest.param(
            "/api/generate",
            {"model": "m", "prompt": "What?", "images": [b64(PICTURE), b64(SOUND)]},
            Message("user", "What?", attachments=(image(), Attachment("audio", SOUND))),
            id="ollama-generate",
        ),
    ],
)
def test_media_reach_the_engine(
    stage: Stage, path: str, body: dict[str, Any], expected: Message
) -> None:
    assert ask(stage, path, body).status == 200
    assert stage.prompt.messages == (expected,)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda text: text.rstrip("="), id="without-padding"),
        pytest.param(lambda text: text.replace("+", "-").replace("/", "_"), id="url-safe"),
        pytest.param(lambda text: "\r\n".join(textwrap.wrap(text, 76)), id="in-lines"),
        pytest.param(lambda text: f" {text}\n\t", id="with-spaces-around"),
    ],
)
def test_every_usual_form_of_base64_is_read(stage: Stage, write: Callable[[str], str]) -> None:
    url = f"data:image/png;base64,{write(b64(PICTURE))}"
    assert ask(stage, CHAT, openai({"type": "image_url", "image_url": {"url": url}})).status == 200
    assert stage.prompt.messages[0].attachments == (image(),)


def test_a_picture_in_a_tool_result_stays_there(stage: Stage) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "is_error": True,
        "content": [
            {"type": "text", "text": "seen"},
            block({"type": "base64", "media_type": "image/png", "data": b64(PICTURE)}),
        ],
    }
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    body = anthropic(result)
    body["messages"].insert(0, {"role": "assistant", "content": [use]})
    body["messages"].insert(0, {"role": "user", "content": "hi"})
    assert ask(stage, "/v1/messages", body).status == 200
    tool = stage.prompt.messages[-1]
    assert (tool.role, tool.content, tool.attachments) == ("tool", "Error: seen", (image(11),))


def test_joined_messages_keep_the_places_of_their_pictures(stage: Stage) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, part]},
        {"role": "user", "content": [part, {"type": "text", "text": "two"}]},
    ]
    assert ask(stage, CHAT, {"messages": messages}).status == 200
    assert stage.prompt.messages == (
        Message("user", "one\n\ntwo", attachments=(image(3), image(5))),
    )


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize(
    "case", sorted(HOSTILE.keys() - {"truncated png", "tiles of the same bytes"})
)
def test_hostile_media_are_refused(stage: Stage, path: str, case: str) -> None:
    data, sentence = HOSTILE[case]
    source = {"type": "base64", "media_type": "image/png", "data": b64(data)}
    bodies = {
        CHAT: openai({"type": "image_url", "image_url": {"url": data_url(data)}}),
        "/v1/responses": responses({"type": "input_image", "image_url": data_url(data)}),
        "/v1/messages": anthropic(block(source)),
        "/api/chat": {
            "model": "m",
            "messages": [{"role": "user", "content": "x", "images": [b64(data)]}],
        },
    }
    reply = ask(stage, path, bodies[path])
    assert reply.status == 400
    assert re.search(f"{sentence}|empty|is not a picture", reply.body.decode())


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://example.org/a.png", "does not fetch URLs"),
        ("http://127.0.0.1/a.png", "does not fetch URLs"),
        ("file:///etc/passwd", "is not a data URL"),
        ("/etc/passwd", "is not a data URL"),
        ("data:image/png;base64,####", "not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("", "is not a data URL"),
        ("ftp://example.org/a.png", "is not a data URL"),
    ],
)
def test_no_url_is_followed_unless_allowed(stage: Stage, url: str, sentence: str) -> None:
    reply = ask(stage, CHAT, openai({"type": "image_url", "image_url": {"url": url}}))
    assert reply.status == 400
    assert sentence in reply.error["message"]
    assert reply.error["param"] == "messages[0].content[0].image_url"
    body = anthropic(block({"type": "url", "url": url}))
    assert ask(stage, "/v1/messages", body).status == 400


@pytest.fixture(scope="module")
def fetching() -> Iterator[Stage]:
    config = ServerConfig(
        heartbeat_s=UNHURRIED.heartbeat_s, limits=UNHURRIED.limits, allow_fetch=True
    )
    with serving(config) as running:
        yield running


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/v1/models",
        "http://localhost:{port}/v1/models",
        "http://[::1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://0.0.0.0:{port}/",
        "http://10.0.0.1/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://2130706433:{port}/",
        "file:///etc/passwd",
    ],
)
def test_private_addresses_are_never_fetched(fetching: Stage, url: str) -> None:
    url = url.format(port=fetching.port)
    reply = ask(fetching, CHAT, openai({"type": "image_url", "image_url": {"url": url}}))
    assert reply.status == 400
    assert re.search("private address|has no address|is not a data URL", reply.error["message"])


def test_too_many_pictures_are_refused(stage: Stage) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}
    reply = ask(stage, CHAT, openai(*[part] * 50))
    assert reply.status == 400
    assert "more than 32 pictures" in reply.error["message"]
    messages = [
        message
        for _ in range(4)
        for message in (
            {"role": "user", "content": [part] * 10},
            {"role": "assistant", "content": "I see."},
        )
    ]
    reply = ask(stage, CHAT, {"messages": messages})
    assert reply.status == 400


def test_a_picture_may_be_larger_than_a_body_without_one(stage: Stage) -> None:
    large = PICTURE + bytes(15_000_000)
    reply = ask(stage, CHAT, openai({"type": "image_url", "image_url": {"url": data_url(large)}}))
    assert reply.status == 200
    text = "a " * (ServerLimits().body_bytes // 2 + 1)
    reply = ask(stage, CHAT, {"messages": [{"role": "user", "content": text}]})
    assert reply.error["code"] == "request_too_large"


def test_uploaded_files_and_unknown_parts_are_refused(stage: Stage) -> None:
    part: dict[str, Any] = {"type": "file", "file": {"file_id": "file-1"}}
    assert "stores no files" in ask(stage, CHAT, openai(part)).error["message"]
    part = {"type": "video_url", "video_url": {"url": "x"}}
    assert "'video_url' cannot be read" in ask(stage, CHAT, openai(part)).error["message"]


def test_counting_routes_take_pictures(stage: Stage) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}
    source = {"type": "base64", "media_type": "image/png", "data": b64(PICTURE)}
    for path, body in (
        ("/v1/messages/count_tokens", anthropic(block(source), TEXT)),
        ("/tokenize", openai(part, TEXT)),
        ("/apply-template", openai(part, TEXT)),
    ):
        assert ask(stage, path, body).status == 200, path
