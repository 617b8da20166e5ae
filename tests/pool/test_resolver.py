"""Which models a client can name, how they are loaded, and whether there is room: over real small files."""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from localchat.config.paths import Paths
from localchat.config.settings import Settings
from localchat.engine.attached.protocol import AttachSpec
from localchat.engine.options import EngineOptions
from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.fit.load_options import LoadOptions
from localchat.models.resolve import ResolvedModel
from localchat.pool.admission import check_memory
from localchat.pool.entry import ModelSpec, PoolEntry
from localchat.pool.resolver import ModelResolver
from tests.support.gguf_files import write_model
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(*(tmp_path / name for name in ("s.toml", "data", "state", "cache", "models")))
    paths.models_dir.mkdir()
    write_model(paths.models_dir / "small.gguf", "llama")
    return paths


@pytest.fixture
def own(tmp_path: Path) -> ResolvedModel:
    path = write_model(tmp_path / "mine.gguf", "llama")
    return ResolvedModel(str(path), "mine", path, "a test")


def settings_for(names: Iterable[str]) -> Settings:
    return Settings(context_length=99 if "small" in names else None, threads=3)


@pytest.fixture
def resolver(own: ResolvedModel, paths: Paths) -> ModelResolver:
    return ModelResolver(own, settings_for, paths, {}, max_slots=5)


def test_empty_word_and_own_name_mean_the_servers_own_model(
    resolver: ModelResolver, own: ResolvedModel
) -> None:
    for word in ("", "mine", own.word):
        spec = resolver.resolve(word)
        assert (spec.name, spec.options.model) == ("mine", own.path)
    assert spec.options.load.max_slots == 5 and spec.options.load.threads == 3


def test_an_own_model_with_an_alias_answers_to_all_its_names(
    own: ResolvedModel, paths: Paths
) -> None:
    seen_names: list[str] = []

    def record(names: Iterable[str]) -> Settings:
        seen_names.extend(names)
        return Settings()

    alias = msgspec.structs.replace(own, word="coder", name="coder", target="mine")
    resolver = ModelResolver(alias, record, paths, {})
    for name in ("", "coder", "mine"):
        assert resolver.resolve(name).name == "coder"
    assert seen_names[:2] == ["mine", "coder"]
    assert resolver.models()[0].name == "coder"


def test_more_slots_are_for_all_models_of_a_server(own: ResolvedModel, paths: Paths) -> None:
    for more in (False, True):
        found = ModelResolver(own, settings_for, paths, {}, more_slots=more)
        for options in (found.resolve("").options, found.resolve("guide").options):
            assert options.load.max_slots == 16 and options.load.more_slots is more


def test_model_of_the_library_has_its_own_settings(resolver: ModelResolver, paths: Paths) -> None:
    spec = resolver.resolve("small")
    assert spec.options.model == paths.models_dir / "small.gguf"
    assert spec.options.load.context_tokens == 99
    assert resolver.resolve("guide").name == "guide"


def test_client_names_no_file(
    resolver: ModelResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_model(tmp_path / "other.gguf", "llama")
    monkeypatch.chdir(tmp_path)
    for word in (str(other), "other.gguf", "./other.gguf", "../x", "models/small.gguf", "~/x.gguf"):
        with pytest.raises((ModelMissing, UsageError)):
            resolver.resolve(word)


def test_owner_names_a_file_and_what_it_insists_on(
    resolver: ModelResolver, own: ResolvedModel
) -> None:
    plain = resolver.resolve_request(AttachSpec(os.fsencode(own.path), "whatever"))
    assert plain.key == resolver.resolve("").key
    insisted = AttachSpec(
        os.fsencode(own.path), "mine", load=LoadOptions(context_tokens=64, gpu_layers=0, threads=1)
    )
    spec = resolver.resolve_request(insisted)
    assert (spec.options.load.context_tokens, spec.options.load.gpu_layers) == (64, 0)
    assert spec.key != plain.key
    with pytest.raises(ModelMissing):
        resolver.resolve_request(AttachSpec(b"/nowhere.gguf", "x"))


def test_list_has_the_own_model_first_and_what_can_be_run(
    resolver: ModelResolver, paths: Paths
) -> None:
    assert [one.name for one in resolver.models()] == ["mine"]
    assert resolver.stale
    (paths.models_dir / "broken.gguf").write_bytes(b"GGUF nonsense")
    resolver.refresh()
    known = {one.name: one for one in resolver.models()}
    assert next(iter(known)) == "mine"
    assert "broken" not in known
    small = known["small"]
    assert small.context_train == 512 and small.created > 0
    assert (small.architecture, small.size_bytes > 1000, small.parameters > 0) == (
        known["mine"].architecture,
        True,
        True,
    )
    assert small.architecture and "infill" not in small.abilities
    assert not resolver.stale


def test_a_header_is_read_once_for_each_state_of_its_file(
    resolver: ModelResolver, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.refresh()

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("it is known already")

    with monkeypatch.context() as patched:
        patched.setattr("localchat.models.info.inspect.read_header", unexpected)
        resolver.refresh()
    before = {one.name: one for one in resolver.models()}["small"]
    os.utime(paths.models_dir / "small.gguf", (1_700_000_000, 1_700_000_000))
    resolver.refresh()
    after = {one.name: one for one in resolver.models()}["small"]
    assert after.created == 1_700_000_000 != before.created


def test_memory_is_checked_by_live_memory_and_by_what_still_loads(own: ResolvedModel) -> None:
    options = EngineOptions(own.path, load=LoadOptions(context_tokens=512))
    free = check_memory(options, [])
    assert free.fits and not free.cramped and 0 < free.needed_bytes < free.free_bytes
    loading = PoolEntry(ModelSpec("x", options), _Loading(), free.free_bytes, 0.0)
    beside = check_memory(options, [loading])
    assert not beside.fits and beside.free_bytes < free.needed_bytes


def test_file_that_is_no_model_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nonsense")
    with pytest.raises(ModelInvalid):
        check_memory(EngineOptions(broken), [])


class _Loading(ScriptedEngine):
    """Alive, and nothing known of it yet."""
