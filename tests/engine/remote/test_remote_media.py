"""Pictures and recordings become OpenAI's parts, in formats that every server reads."""

import base64

import PIL.Image
import pytest

from localchat.engine.remote.engine import _media
from localchat.engine.remote.request_body import request_body
from localchat.engine.request import Attachment, GenerateRequest, Message, Messages
from localchat.media.format import media_format
from tests.support.media import encoded, png, wav


def parts(*attachments: Attachment, text: str = "one two") -> list[dict[str, object]]:
    messages = Messages((Message("user", text, attachments=attachments),))
    content = request_body(GenerateRequest(messages), "m")["messages"][0]["content"]
    assert isinstance(content, list)
    return content


def test_parts_keep_the_order_of_text_and_pictures() -> None:
    picture = Attachment("image", png(), 3)
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    assert parts(picture, picture) == [
        {"type": "text", "text": "one"},
        image,
        image,
        {"type": "text", "text": " two"},
    ]
    assert parts(Attachment("image", png()), text="") == [image]


def test_formats_that_few_servers_read_are_converted() -> None:
    bitmap = encoded(PIL.Image.new("RGB", (2, 2), "red"), "BMP")
    (image,) = parts(Attachment("image", bitmap), text="")
    assert str(image["image_url"]).startswith("{'url': 'data:image/png;base64,iVBOR")
    for data, name in ((wav(0.1), "wav"), (wav(0.1, format_="MP3"), "mp3")):
        (audio,) = parts(Attachment("audio", data), text="")
        assert audio["input_audio"] == {"data": base64.b64encode(data).decode(), "format": name}
    (audio,) = parts(Attachment("audio", wav(0.1, format_="FLAC")), text="")
    sound = audio["input_audio"]
    assert isinstance(sound, dict) and sound["format"] == "wav"
    format_ = media_format(base64.b64decode(sound["data"])[:64])
    assert format_ is not None and format_.suffix == ".wav"


def test_text_stays_a_string() -> None:
    messages = Messages((Message("user", "hi"),))
    body = request_body(GenerateRequest(messages), "m")
    assert body["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("entry", "media"),
    [
        ({}, ()),
        ({"architecture": {"input_modalities": ["text", "image", "audio"]}}, ("image", "audio")),
        ({"architecture": "llama", "capabilities": ["completion", "multimodal"]}, ("image",)),
        ({"architecture": {"input_modalities": "text"}, "capabilities": None}, ()),
    ],
)
def test_the_list_of_models_says_what_a_remote_model_reads(
    entry: dict[str, object], media: tuple[str, ...]
) -> None:
    assert _media(entry) == media
