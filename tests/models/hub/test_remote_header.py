"""Headers of models on a hub, read by ranges alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.errors import ModelInvalid, NetworkError
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.checkpoint import Checkpoint, ModelSummary, read_checkpoint
from localchat.model_files.open_gguf import read_header
from localchat.models.hub import remote_header
from localchat.models.hub.client import HubClient
from localchat.models.hub.pull import select_files
from localchat.models.hub.remote_header import read_remote_header
from localchat.models.hub.retry import MAX_TRIES
from localchat.models.names import parse
from tests.support.cuda_configs import QWEN25
from tests.support.fake_hub import FakeHub, Fault
from tests.support.gguf_files import Q4_0, Size, llama, write_split
from tests.support.shards import SHARDS

LARGE = Size(layers=4, width=512, heads=8, feed_forward=2048, vocab=40_000, code=Q4_0)


class Looker:
    """Looks into a repository; `waits` and what the hub counted tell the rest."""

    def __init__(self, hub: FakeHub, waits: list[float]) -> None:
        self.hub = hub
        self.waits = waits

    def __call__(self, word: str) -> ModelSummary:
        hub = HubClient(self.hub.url, None, 5.0)
        choice = select_files(parse(word, {}), hub, lambda _: None)
        return read_remote_header(choice, hub, lambda _: None)

    def add(self, files: Mapping[str, bytes]) -> None:
        self.hub.add("maker/Model", files)


@pytest.fixture
def look(hub: FakeHub, waits: list[float]) -> Looker:
    return Looker(hub, waits)


def test_a_gguf_is_known_by_its_first_bytes(look: Looker, hub: FakeHub, tmp_path: Path) -> None:
    whole = llama(LARGE).encode()
    look.add({"model-q4_0.gguf": whole})
    found = look("maker/Model")
    assert isinstance(found, ModelShape)
    (tmp_path / "m.gguf").write_bytes(whole)
    local = model_shape(read_header(tmp_path / "m.gguf"))
    assert replace(found, name=local.name) == local
    assert hub.sent < len(whole) / 4
    assert all("Range" in one.headers for one in hub.requests("header"))
    assert not hub.requests("store")


def test_all_parts_of_a_split_model_count(look: Looker, tmp_path: Path) -> None:
    parts = write_split(tmp_path, "model-q4_k_m", 3, Size(layers=4))
    look.add({part.name: part.read_bytes() for part in parts})
    found = look("maker/Model")
    local = model_shape(read_header(parts[0]))
    assert isinstance(found, ModelShape)
    assert found.weights == local.weights
    assert found.file_bytes == local.file_bytes


def test_a_part_of_another_model_is_refused(look: Looker, tmp_path: Path) -> None:
    one, two = write_split(tmp_path, "model-q4_k_m", 2, Size(layers=4))
    look.add({one.name: one.read_bytes(), two.name: one.read_bytes()})
    with pytest.raises(ModelInvalid, match="part 2 of 2"):
        look("maker/Model")


def test_a_checkpoint_is_known_by_its_config_and_headers(
    look: Looker, hub: FakeHub, tmp_path: Path
) -> None:
    files = {"config.json": json.dumps(QWEN25).encode(), **SHARDS}
    look.add(files)
    found = look("maker/Model")
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    local = read_checkpoint(tmp_path)
    assert isinstance(found, Checkpoint)
    assert found.config == local.config == QWEN25
    assert found.weights_bytes == local.weights_bytes == 1_800_000
    assert found.quantization == local.quantization == "BF16"
    assert hub.sent < 700_000


@pytest.mark.parametrize(
    ("name", "stated", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "AWQ"),
    ],
)
def test_an_early_checkpoint_on_the_hub_tells_its_quantization_beside(
    look: Looker, name: str, stated: Mapping[str, int], method: str, tmp_path: Path
) -> None:
    files = {
        "config.json": json.dumps(QWEN25).encode(),
        name: json.dumps(stated).encode(),
        **SHARDS,
    }
    look.add(files)
    found = look("maker/Model")
    for file, body in files.items():
        (tmp_path / file).write_bytes(body)
    local = read_checkpoint(tmp_path)
    assert isinstance(found, Checkpoint)
    assert found.quantization == method
    assert found.config == local.config
    assert found.config["quantization_config"]["group_size"] == 128


def test_a_server_that_fails_is_asked_again(look: Looker, hub: FakeHub) -> None:
    look.add({"model-q4_0.gguf": llama(Size()).encode()})
    hub.faults += [Fault("header", 503), Fault("header", 429, {"Retry-After": "7"})]
    assert look("maker/Model").weights_bytes
    assert look.waits == [1.0, 7.0]
    hub.faults += [Fault("header", cut_after=100)]
    assert look("maker/Model").weights_bytes
    hub.faults += [Fault("header", 503)] * MAX_TRIES
    with pytest.raises(NetworkError, match="503"):
        look("maker/Model")


def test_a_server_that_ignores_ranges_is_borne_up_to_a_bound(
    look: Looker, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llama(LARGE).encode()
    look.add({"model-q4_0.gguf": whole})
    hub.faults += [Fault("header", no_range=True)] * 20
    assert look("maker/Model").weights_bytes
    hub.faults.clear()
    monkeypatch.setattr(remote_header, "MAX_IGNORED_BYTES", 300_000)
    hub.faults += [Fault("header", no_range=True)] * 20
    with pytest.raises(NetworkError, match="ignores ranges"):
        look("maker/Model")


def test_a_wrong_range_is_refused(look: Looker, hub: FakeHub) -> None:
    look.add({"model-q4_0.gguf": llama(Size()).encode()})
    hub.faults.append(Fault("header", content_range="bytes 5-99/1000000"))
    with pytest.raises(NetworkError, match="another range"):
        look("maker/Model")


def test_a_header_without_end_is_given_up(look: Looker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_header, "MAX_BYTES", 400_000)
    look.add({"model-q4_0.gguf": llama(LARGE).encode()})
    with pytest.raises(ModelInvalid, match=r"is longer than 400 kB"):
        look("maker/Model")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"model-q4_0.gguf": b"<html>" + bytes(2000)}, "HTML"),
        ({"model.safetensors": b"x", "tokenizer.json": b"{}"}, "has no config.json"),
        ({"model.safetensors": b"x" * 99, "config.json": b"[]"}, "not a JSON object"),
        ({"model.safetensors": b"x" * 99, "config.json": b"{}"}, "claims"),
    ],
)
def test_what_is_no_model_is_said_to_be_none(
    look: Looker, files: Mapping[str, bytes], told: str
) -> None:
    look.add(files)
    with pytest.raises(ModelInvalid, match=told):
        look("maker/Model")
