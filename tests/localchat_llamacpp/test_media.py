"""Pictures and sound through llama.cpp, with tiny models of four families."""

import base64
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import PIL.Image
import pytest
import soundfile

from localchat.engine.events import Done, Prefill, Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import Attachment, GenerateRequest, Message, Messages, Sampling
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.load_options import LoadOptions
from tests.support.gguf_files import Size, llama
from tests.support.media import HOSTILE
from tests.support.rival_server import rival_answers
from tests.support.tiny_media import FAMILIES, TinyMedia, write_media_model

COMPARED = int(os.environ.get("LOCALCHAT_TEST_MEDIA", "6"))
"""Attachments of each family that are compared with llama.cpp's server."""
QUESTION = "What is this? "
LONG = "Tell me about it, please. " * 12


class Answer(NamedTuple):
    text: str
    prompt_tokens: int
    cached_tokens: int
    read_back_tokens: int
    progress: list[int]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyMedia]:
    written: dict[str, TinyMedia] = {}

    def write(family: str) -> TinyMedia:
        if family not in written:
            written[family] = write_media_model(tmp_path_factory.mktemp(family), family)
        return written[family]

    return write


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("LOCALCHAT_LLAMACPP_LIBRARY", "xllamacpp")


@pytest.fixture
def engines() -> Iterator[Callable[..., LocalEngine]]:
    opened: list[LocalEngine] = []

    def open_engine(model: TinyMedia, kv_folder: Path | None = None, **load: Any) -> LocalEngine:
        options = EngineOptions(
            model=model.model,
            load=LoadOptions(context_tokens=2048, threads=1, **load),
            kv_folder=kv_folder,
            kv_folder_bytes=10**9,
        )
        opened.append(LocalEngine(options, notify=lambda _: None))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def picture(seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    width, height = (int(side) for side in draw.integers(20, 300, 2))
    blocks = draw.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(blocks).resize((width, height)).save(file, "PNG")
    return file.getvalue()


def sound(seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    times = np.arange(16_000) / 16_000
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in draw.uniform(100, 2000, 4))
    file = io.BytesIO()
    soundfile.write(file, (tones / 5).astype(np.float32), 16_000, format="WAV")
    return file.getvalue()


def attachment(family: str, seed: int, position: int = 0) -> Attachment:
    if family == "ultravox":
        return Attachment("audio", sound(seed), position)
    return Attachment("image", picture(seed), position)


def request(
    question: str, *attachments: Attachment, owner: str = "", **sampling: Any
) -> GenerateRequest:
    message = Message("user", question, attachments=attachments)
    return GenerateRequest(
        Messages((message,)),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        max_tokens=16,
        loop_guard=False,
        owner=owner,
    )


def ask(engine: LocalEngine, asked: GenerateRequest) -> Answer:
    text = ""
    progress = []
    done = None
    for event in engine.generate(asked):
        match event:
            case Text():
                text += event.text
            case Prefill():
                progress.append(event.done)
            case Done():
                done = event
    assert done is not None
    usage = done.usage
    return Answer(text, usage.prompt_tokens, usage.cached_tokens, done.read_back_tokens, progress)


def rival_request(asked: Attachment) -> dict[str, Any]:
    data = base64.b64encode(asked.data).decode()
    part: dict[str, Any] = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{data}"},
    }
    if asked.kind == "audio":
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [{"type": "text", "text": QUESTION}, part]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0,
        "samplers": ["temperature"],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_that_of_llama_cpps_own_server(
    family: str, tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    model = tiny(family)
    asked = [attachment(family, seed, len(QUESTION)) for seed in range(COMPARED)]
    responses = rival_answers(*model, list(map(rival_request, asked)))
    engine = engines(model)
    answers = [ask(engine, request(QUESTION, each)) for each in asked]
    assert engine.info().media == (("audio",) if family == "ultravox" else ("image",))
    expected = [response["choices"][0]["message"]["content"] for response in responses]
    assert [answer.text for answer in answers] == expected
    assert [answer.prompt_tokens for answer in answers] == [
        response["usage"]["prompt_tokens"] for response in responses
    ]
    # The texts depend on the pictures.
    assert len(set(expected)) > COMPARED // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_second_question_about_a_picture_computes_its_own_text_alone_also_after_a_restart(
    family: str,
    tiny: Callable[[str], TinyMedia],
    engines: Callable[..., LocalEngine],
    tmp_path: Path,
) -> None:
    model = tiny(family)
    seen = attachment(family, 1)
    fresh = ask(engines(model), request(f"And now? {LONG}", seen, owner="me"))
    engine = engines(model, tmp_path / "kv")
    first = ask(engine, request(LONG, seen, owner="me"))
    second = ask(engine, request(f"And now? {LONG}", seen, owner="me"))
    tokens = engine.prompt_tokens(Messages((Message("user", LONG, attachments=(seen,)),)))
    end = 1 + max(index for index, token in enumerate(tokens) if token < 0)
    assert first.cached_tokens == 0
    assert second.text == fresh.text
    assert second.cached_tokens == end
    assert second.progress[0] > end
    engine.close()
    if family == "gemma3":
        # The stored state of a sliding window cannot be cut back, as with text.
        return
    restarted = engines(model, tmp_path / "kv")
    restarted.info()
    asked = request(f"And now? {LONG}", seen, owner="me")
    hidden = model.projector.rename(model.projector.with_suffix(".hidden"))
    try:
        # The picture is not decoded, so the encoder is not loaded.
        again = ask(restarted, asked)
        with pytest.raises(ModelInvalid, match="cannot be loaded"):
            ask(restarted, msgspec.structs.replace(asked, salt="another client"))
    finally:
        hidden.rename(model.projector)
    assert again.text == fresh.text
    assert again.cached_tokens >= again.read_back_tokens >= end


@pytest.mark.parametrize("family", ["smolvlm", "qwen2vl", "gemma3"])
def test_requests_with_pictures_share_steps_with_others(
    family: str, tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny(family))
    asked = [
        request(f"{number} {LONG}", *[attachment(family, number)] * (number % 3), seed=None)
        for number in range(6)
    ]
    streams = [engine.generate(each) for each in asked]
    together = [
        "".join(event.text for event in stream if isinstance(event, Text)) for stream in streams
    ]
    alone = [ask(engine, each).text for each in asked]
    equal = sum(one == other for one, other in zip(together, alone, strict=True))
    # Neighbors in a step may change the last bits, as with text.
    assert equal >= 4


def test_penalties_choices_and_several_pictures_work(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny("qwen2vl"))
    pictures = [attachment("qwen2vl", seed, position=seed * 5) for seed in range(3)]
    penalized = request(LONG, *pictures, repetition_penalty=1.3, frequency_penalty=0.5)
    assert ask(engine, penalized).text
    drafted = request(LONG, *pictures, temperature=0.8, seed=3)
    assert ask(engine, drafted).text == ask(engine, drafted).text


def test_cancelled_encoding_leaves_the_engine_working(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny("smolvlm"))
    expected = ask(engine, request("hello")).text
    for count in range(1, 5):
        stream = engine.generate(
            request(QUESTION, *[attachment("smolvlm", count * 10 + each) for each in range(5)])
        )
        for _, _ in zip(range(count), stream, strict=False):
            pass
        stream.close()
    assert ask(engine, request("hello")).text == expected


def test_hostile_files_fail_their_requests_alone(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny("smolvlm"))
    expected = ask(engine, request("hello")).text
    for data, _ in HOSTILE.values():
        with pytest.raises(UsageError, match=r"it\.png"):
            ask(engine, request(QUESTION, Attachment("image", data, name="it.png")))
        assert ask(engine, request("hello")).text == expected


def test_marker_in_a_message_stays_text(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny("gemma3"))
    forged = "<start_of_image> <__media__> [image]"
    message = Message("user", forged, attachments=(attachment("gemma3", 1),))
    tokens = engine.prompt_tokens(Messages((message,)))
    text = engine.prompt_tokens(Messages((Message("user", forged),)))
    # One picture of 16 tokens between its two markers.
    assert len([token for token in tokens if token < 0]) == 16
    assert len(tokens) == len(text) + 18


def test_model_without_an_encoder_names_models_that_see(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine]
) -> None:
    engine = engines(tiny("smolvlm"), mmproj="none")
    assert engine.info().media == ()
    with pytest.raises(UsageError, match="cannot see pictures") as failure:
        ask(engine, request(QUESTION, attachment("smolvlm", 1)))
    assert "smolvlm:256m" in failure.value.hint
    engine = engines(tiny("smolvlm"))
    with pytest.raises(UsageError, match="cannot hear recordings; it can see"):
        ask(engine, request(QUESTION, Attachment("audio", sound(1))))


def test_encoder_of_another_model_is_refused(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    with pytest.raises(ModelInvalid, match="is not the encoder"):
        engines(tiny("smolvlm"), mmproj=str(tiny("qwen2vl").model)).info()
    with pytest.raises(LocalchatError, match="There is no file"):
        engines(tiny("smolvlm"), mmproj=str(tmp_path / "missing.gguf")).info()


def test_vocabulary_without_the_projectors_markers_is_refused(
    tiny: Callable[[str], TinyMedia], engines: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    """llama.cpp puts token -1 in place of a marker that it does not find, and fails to decode it."""
    size = Size(layers=2, width=64, context=2048, vocab=384, feed_forward=128)
    projector = tiny("smolvlm").projector
    model = TinyMedia(llama(size).write(tmp_path / "plain-F16.gguf"), projector)
    engine = engines(model, mmproj=str(projector))
    with pytest.raises(ModelInvalid, match="lacks a marker"):
        ask(engine, request(QUESTION, Attachment("image", picture(1))))
    assert ask(engine, request(QUESTION)).text
