"""A build that crashes in warm-up is survived, said, and remembered."""

from collections.abc import Callable
from pathlib import Path

from localchat.engine.local.crash_record import CrashRecord
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.build_advice import build_key
from tests.support.answers import ask

REQUEST = GenerateRequest(
    TextPrompt("hello"), sampling=Sampling(temperature=0), max_tokens=4, ignore_eos=True
)


def _engine(model: Path, state: Path, say: Callable[[str], None]) -> LocalEngine:
    options = EngineOptions(
        load=LoadOptions(context_tokens=512, threads=1),
        model=model,
        backend="tests.support.crashing_backend:CrashingBackend",
        state_dir=state,
    )
    return LocalEngine(options, notify=say)


def test_a_crash_in_warm_up_is_survived_and_remembered(
    models: dict[str, Path], tmp_path: Path
) -> None:
    said: list[str] = []
    engine = _engine(models["llama"], tmp_path, said.append)
    first = ask(engine, REQUEST)
    assert engine.info().safe_mode
    engine.close()
    assert first.done.usage.completion_tokens == 4
    assert any("SIGSEGV" in sentence and "safe mode" in sentence for sentence in said)
    assert CrashRecord(tmp_path / "safe-builds.json").known() == (build_key(),)

    said.clear()
    again = _engine(models["llama"], tmp_path, said.append)
    assert ask(again, REQUEST).text == first.text
    again.close()
    assert not any("SIGSEGV" in sentence for sentence in said)
