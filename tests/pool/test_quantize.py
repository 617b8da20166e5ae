"""Rounding at the load on its way from the option."""

import os
from pathlib import Path

import pytest

from localchat.backend_api.interface import ModelInfo
from localchat.config.paths import Paths
from localchat.config.settings import Settings
from localchat.core.engine_info import fingerprint
from localchat.engine.attached.protocol import AttachSpec
from localchat.engine.options import EngineOptions
from localchat.errors import UsageError
from localchat.fit.load_options import LoadOptions
from localchat.models.resolve import ResolvedModel
from localchat.pool.entry import ModelSpec
from localchat.pool.resolver import ModelResolver, engine_options
from localchat_llamacpp.plan.memory_plan import check_options


def test_settings_reach_the_options_of_an_engine(tmp_path: Path) -> None:
    model = ResolvedModel("m", "m", tmp_path, "")
    paths = Paths(*[tmp_path] * 5)
    options = engine_options(model, Settings(quantize="int8"), paths, max_slots=1)
    assert options.load.quantize == "int8"
    assert engine_options(model, Settings(), paths, max_slots=1).load.quantize is None


def test_engines_with_and_without_are_two(tmp_path: Path) -> None:
    options = EngineOptions(tmp_path)
    other = EngineOptions(tmp_path, load=LoadOptions(quantize="int8"))
    assert ModelSpec("m", options).key != ModelSpec("m", other).key


def test_another_program_may_insist_on_it(tmp_path: Path) -> None:
    own = ResolvedModel("m", "m", tmp_path, "")
    paths = Paths(*[tmp_path] * 5)
    resolver = ModelResolver(own, lambda names: Settings(), paths, {})
    file = os.fsencode(tmp_path)
    assert resolver.resolve_request(AttachSpec(file, "m")).options.load.quantize is None
    rounded = AttachSpec(file, "m", load=LoadOptions(quantize="int8"))
    assert resolver.resolve_request(rounded).options.load.quantize == "int8"


def test_a_text_of_it_has_another_fingerprint() -> None:
    info = ModelInfo("m", "qwen2", "bf16", 0, 64, 8, 0, None)
    rounded = [fingerprint(info, "bf16", (), LoadOptions(quantize=to)) for to in ("fp8", "int4")]
    assert len({*rounded, fingerprint(info, "bf16", ())}) == 3


def test_llamacpp_refuses_it_with_the_way() -> None:
    check_options(LoadOptions())
    with pytest.raises(UsageError, match="cannot round a model to fp8") as caught:
        check_options(LoadOptions(quantize="fp8"))
    assert "--quantize" in str(caught.value.hint)
