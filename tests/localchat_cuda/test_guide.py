"""The built-in guide says here, as safetensors and as GGUF, what it says through llama.cpp."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.fit.load_options import LoadOptions
from tests.support.answers import Answer, ask, told_apart

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "localchat" / "guide" / "guide.gguf"
QUESTIONS = ("What is localchat?", "How do I use another model?", "What does KV cache mean?")
REFERENCE = "localchat_cuda.backend:ReferenceBackend"


@pytest.fixture(scope="module", params=["checkpoint", "gguf"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """The guide through llama.cpp, and its fp32 checkpoint or the same file through this backend."""
    if not GUIDE.is_file():
        pytest.skip("this checkout has no guide")
    folder = tmp_path_factory.mktemp("guide")
    script = ROOT / "scripts" / "tools" / "guide" / "checkpoint.py"
    if request.param == "checkpoint":
        subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    ours = GUIDE if request.param == "gguf" else folder
    load = LoadOptions(context_tokens=1024, threads=1, max_slots=2)
    opened = [
        LocalEngine(
            EngineOptions(path, load, backend=name, speculation=False), notify=lambda text: None
        )
        for path, name in ((GUIDE, "llamacpp"), (ours, REFERENCE))
    ]
    yield opened[0], opened[1]
    for engine in opened:
        engine.close()


def answers(engine: LocalEngine) -> list[Answer]:
    return [
        ask(
            engine,
            GenerateRequest(
                Messages((Message("user", question),)),
                sampling=Sampling(temperature=0),
                max_tokens=24,
                logprobs=2,
                prompt_logprobs=0,
            ),
        )
        for question in QUESTIONS
    ]


def test_the_guide_answers_alike_and_is_as_sure(engines: tuple[LocalEngine, LocalEngine]) -> None:
    theirs, ours = (answers(engine) for engine in engines)
    # llama.cpp rounds activations to 8 bits, so texts may part where two tokens are as good.
    assert all(told_apart(a, b) < 0.3 for a, b in zip(theirs, ours, strict=True))
    assert sum(a.text == b.text for a, b in zip(theirs, ours, strict=True)) >= 2
    costs = []
    for answered in (theirs, ours):
        logs = [entry.logprob for one in answered for entry in one.prompt_logprobs]
        costs.append(math.exp(-sum(logs) / len(logs)))
    assert costs[1] == pytest.approx(costs[0], rel=0.01)
