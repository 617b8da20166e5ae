"""LoRA adapters over HTTP: llama.cpp's routes and its field."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from localchat.fit.load_options import LoraAdapter
from tests.support.http_server import Stage, ask, chat, serving


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with serving() as running, pytest.MonkeyPatch.context() as patch:
        lora = LoraAdapter("/a/one.gguf"), LoraAdapter("/a/two.gguf", 0.5)
        info = msgspec.structs.replace(running.engine.info(), lora=lora)
        patch.setattr(type(running.engine), "info", lambda engine: info)
        yield running


def test_a_request_names_the_scales_of_its_adapters(stage: Stage) -> None:
    cases: list[tuple[dict[str, Any], tuple[tuple[int, float], ...] | None]] = [
        ({"lora": [{"id": 1, "scale": 0.25}]}, ((1, 0.25),)),
        ({"lora": []}, ()),
        ({}, None),
    ]
    for fields, expected in cases:
        assert chat(stage, **fields).status == 200
        assert stage.last.lora == expected
    ask(stage, "/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 2}]})
    assert stage.last.lora == ((0, 2.0),)


def test_adapters_are_listed(stage: Stage) -> None:
    listed = ask(stage, "/lora-adapters").json
    assert [(adapter["id"], adapter["scale"]) for adapter in listed] == [(0, 1.0), (1, 0.5)]


def test_bad_fields_are_a_400(stage: Stage) -> None:
    assert chat(stage, lora=[{"id": 0, "scale": 1}] * 17).status == 400
    assert chat(stage, lora="style").status == 400


def test_a_salt_of_a_client_cannot_imitate_an_adapter(stage: Stage) -> None:
    assert chat(stage, cache_salt="a\0\0b").status == 200
    assert "\0" not in stage.last.salt
