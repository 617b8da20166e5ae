"""Every installed library of llama.cpp computes the same: tokens and texts alike, numbers within rounding.

Builds differ in their instruction sets, so sums are added up in another order. What the tests of this folder
say of one library, `scripts/test` repeats over the other.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localchat_llamacpp.library_source import VARIABLE, find_library
from tests.support.llamacpp_report import EMBEDDERS, WRITERS, write_models
from tests.support.paths import ROOT

LIBRARIES = ("llama-cpp-python", "xllamacpp")
UNLIKELY = -8.0
"""Log probabilities below are left out: there the same error of a logit is as large, and means nothing."""
Report = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """report(library) -> what it computes; skips the test where it is not installed."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    known: dict[str, dict[str, Any]] = {}

    def made(name: str) -> dict[str, Any]:
        environ = {**os.environ, VARIABLE: name}
        if (library := find_library(environ).library) is None:
            pytest.skip(f"{name} is not installed")
        if name not in known:
            environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "backends")))
            done = subprocess.run(
                [sys.executable, "-m", "tests.support.llamacpp_report", str(folder)],
                env=environ,
                capture_output=True,
                check=True,
            )
            known[name] = json.loads(done.stdout)
            assert known[name]["library"] == str(library.file)
        return known[name]

    return made


@pytest.fixture(params=LIBRARIES[1:])
def pair(request: pytest.FixtureRequest, report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first library computes, and another one."""
    return report(LIBRARIES[0]), report(request.param)


@pytest.mark.parametrize("model", ["guide", *WRITERS])
def test_libraries_tokenize_alike(model: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = (found[f"tokens {model}"] for found in pair)
    assert one == other


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        # Quantized weights meet activations in 8 bits, whose last bit is another; the others are floats.
        ("guide f16", 0.1),
        ("guide q8_0", 0.1),
        ("llama", 0.003),
        ("gemma3", 0.003),
        ("mamba", 0.003),
    ],
)
def test_libraries_write_the_same_texts_with_the_same_probabilities(
    model: str, tolerance: float, pair: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    ones, others = (found[f"answers {model}"] for found in pair)
    for one, other in zip(ones, others, strict=True):
        assert [token for token, _, _ in one] == [token for token, _, _ in other]
        for (_, chosen, top), (_, also, beside) in zip(one, other, strict=True):
            assert also == pytest.approx(chosen, abs=tolerance)
            numbers = dict(map(tuple, beside))
            shared = [pair for pair in top if pair[0] in numbers and pair[1] > UNLIKELY]
            assert len(shared) >= min(1, len(top))
            for token, number in shared:
                assert numbers[token] == pytest.approx(number, abs=tolerance)


@pytest.mark.parametrize("model", EMBEDDERS)
def test_libraries_give_the_same_vectors(
    model: str, pair: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    one, other = (np.asarray(found[f"vectors {model}"]) for found in pair)
    assert np.abs(one - other).max() < 1e-5
    assert np.linalg.norm(one, axis=1) == pytest.approx(1)


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_texts_of_the_guide_are_answers(name: str, report: Report) -> None:
    """Alike is not enough: the answers are those that it was trained to give."""
    tokens = report(name)["tokens guide"]
    pieces = bytes.fromhex(tokens[6])
    assert b"localchat" in pieces
    for answer in report(name)["answers guide f16"]:
        assert max(number for _, number, _ in answer) < 1e-6
        assert np.mean([number for _, number, _ in answer]) > -0.5
