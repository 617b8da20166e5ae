"""The first run: hardware in a line, models to adopt, three recommendations that fit."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.config.paths import Paths, find_paths
from localchat.engine.guide.phrases import PhraseReplacement
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.models.assess import Subject
from localchat.models.catalog import read_catalog, read_models, shipped_file
from localchat.models.guide_phrases import guide_phrases
from localchat.models.names import parse
from localchat.models.onboarding import (
    FirstRun,
    first_run,
    hardware_line,
    is_first_run,
)
from localchat.models.published_shapes import published_model
from localchat.models.quantization_table import quantization_rows
from localchat.models.quantizations import canonical
from localchat.models.recommended_models import (
    Recommendation,
    model_strength,
    recommended_models,
    recommended_names,
)
from tests.support.external_stores import Ollama, gguf
from tests.support.gguf_files import write_model
from tests.support.ram_bandwidth import put_bandwidth

GB = 10**9
LAPTOP = Machine("Core i5", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
MAC = Machine("M2", frozenset({"asimddp"}), 8, 16 * GB, 12 * GB, unified_memory=True)
CARD = Gpu(0, "RTX 4090", 24 * GB, 21 * GB)
DESK = Machine("Ryzen", frozenset({"avx2"}), 8, 64 * GB, 58 * GB, gpus=(CARD,))


@pytest.fixture
def paths() -> Paths:
    return find_paths(os.environ)


@pytest.fixture
def look(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FirstRun]:
    """The first run on a machine whose RAM has this bandwidth."""

    def looked(
        machine: Machine, bytes_per_s: float = 25 * GB, *, offload: bool = False
    ) -> FirstRun:
        put_bandwidth(monkeypatch, bytes_per_s)
        monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: offload)
        return first_run(paths, os.environ, machine)

    return looked


def strength(recommendation: Recommendation) -> float:
    """Parameters of a dense model of 2024 that answers about alike."""
    return model_strength(read_models(shipped_file())[recommendation.entry])


@pytest.mark.parametrize(("machine", "offload"), [(LAPTOP, False), (MAC, True), (DESK, True)])
def test_three_cards_fit_and_grow(
    look: Callable[..., FirstRun], machine: Machine, offload: bool
) -> None:
    recommendations = look(machine, offload=offload).recommendations
    assert [recommendation.role for recommendation in recommendations] == [
        "fast",
        "balanced",
        "best",
    ]
    strengths = [strength(recommendation) for recommendation in recommendations]
    assert strengths == sorted(strengths) and len(set(strengths)) == 3
    for recommendation in recommendations:
        assert recommendation.command == f"localchat pull {recommendation.name}"


def test_a_machine_that_is_far_slower_than_usual_gets_smaller_models(
    look: Callable[..., FirstRun],
) -> None:
    quick, slow = look(LAPTOP).recommendations, look(LAPTOP, 3 * GB).recommendations
    assert strength(slow[-1]) < strength(quick[-1])
    assert all(recommendation.tokens_per_s for recommendation in (*quick, *slow))
    crawling = look(LAPTOP, GB // 10).recommendations
    assert [recommendation.role for recommendation in crawling] == ["fast", "balanced", "best"]
    assert strength(crawling[0]) < strength(crawling[1]) < strength(crawling[2])


def test_a_recommendation_names_its_speed_and_the_download(
    look: Callable[..., FirstRun],
) -> None:
    for card in look(LAPTOP).recommendations:
        assert re.fullmatch(
            r"(quick|balanced|best)( answers)?, about [\d.]+ tok/s, download \d+(\.\d)? [MG]B",
            card.summary,
        )


def test_all_front_ends_recommend_the_same_models(
    look: Callable[..., FirstRun], paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [card.name for card in look(LAPTOP).recommendations]
    monkeypatch.setattr("localchat.backend_api.registry.usable_machine", lambda: LAPTOP)
    assert recommended_names(paths, LAPTOP) == names[::-1]
    texts = [replacement() for replacement in guide_phrases(paths).values()]
    assert all(any(name in text for name in names) for text in texts if "`" in text)


def test_an_answer_without_a_model_name_does_not_look_for_models(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("looked for models")

    monkeypatch.setattr("localchat.models.recommended_models.recommended_names", fail)
    replacement = PhraseReplacement(guide_phrases(paths))
    assert replacement.feed("Temperature sets how freely tokens are drawn.")
    with pytest.raises(AssertionError):
        replacement.feed("Run `localchat run qwen2.5:3b`.")


@pytest.mark.parametrize("bandwidth", [17 * GB, 60 * GB, 400 * GB])
@pytest.mark.parametrize("memory", ["8", "16", "24", "card"])
def test_fit_marks_the_quantization_that_is_recommended(
    memory: str, bandwidth: int, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_bandwidth(monkeypatch, bandwidth)
    machine = DESK
    if memory != "card":
        total = int(memory) * GB
        machine = Machine("cpu", frozenset({"avx2"}), 8, total, total - min(total // 4, 3 * GB))
    monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: memory == "card")
    catalog = read_catalog(paths)
    recommendations = recommended_models(paths, machine)
    assert len(recommendations) == 3
    for card in recommendations:
        shape = published_model(parse(card.entry, catalog))
        assert shape is not None
        options = LoadOptions(max_slots=2)
        rows = quantization_rows(Subject(shape.name, shape), options, machine, None, catalog)
        marked = [row.quantization for row in rows if row.recommended]
        assert marked == ([card.quantization] if rows else [])
        reference = parse(card.name, catalog)
        assert canonical(reference.quantization or "") == card.quantization
        if card.tokens_per_s is not None and marked:
            row = next(row for row in rows if row.recommended)
            assert row.speed is not None
            assert row.speed.tokens_per_s == pytest.approx(card.tokens_per_s)


def test_a_newer_model_counts_as_a_larger_one() -> None:
    catalog = read_models(shipped_file())
    assert model_strength(catalog["qwen3.5:9b"]) > model_strength(catalog["qwen2.5:14b"])
    assert model_strength(catalog["qwen3.6:35b-a3b"]) > model_strength(catalog["granite4:h-small"])


def test_a_machine_too_small_for_anything_gets_no_card(look: Callable[..., FirstRun]) -> None:
    tiny = Machine("old", frozenset(), 1, GB, GB // 5)
    found = look(tiny)
    assert len(found.recommendations) == 0


def test_models_of_other_programs_come_first(
    look: Callable[..., FirstRun], paths: Paths, tmp_path: Path
) -> None:
    assert is_first_run(paths, os.environ)
    Ollama(Path(os.environ["HOME"]) / ".ollama/models").model(
        "registry.ollama.ai/library/qwen2.5/7b", gguf(tmp_path / "a.gguf", 2)
    )
    found = look(LAPTOP)
    assert [model.name for model in found.external] == ["ollama/qwen2.5:7b"]
    assert is_first_run(paths, os.environ)
    paths.models_dir.mkdir(parents=True)
    write_model(paths.models_dir / "mine.gguf")
    assert not is_first_run(paths, os.environ)


def test_the_hardware_is_one_line() -> None:
    assert hardware_line(DESK) == (
        "Ryzen, 8 cores · 64.0 GB of RAM, 58.0 GB free · RTX 4090, 24.0 GB, 21.0 GB free"
    )
    assert "shared with its GPU" in hardware_line(MAC)
