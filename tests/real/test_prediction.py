"""Memory, context, verdicts and quality as planned and as measured with a real model."""

import json
from pathlib import Path

import psutil
import pytest

from localchat.cli.main import run
from localchat.engine.request import GenerateRequest, TextPrompt
from localchat.fit.hardware import read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject, assess
from tests.real.conftest import OpenEngine

CONTEXT = 2048


def planned(path: Path, options: LoadOptions) -> MemoryPlan:
    subject = Subject(path.stem, read_summary(path), path)
    return assess(subject, options, read_machine(), None, speed=False).plan


def read_json(capfd: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, object]:
    assert run([str(arg) for arg in args]) == 0
    found: dict[str, object] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.parametrize("slots", [1, 4])
def test_a_load_takes_the_planned_memory(
    smollm2: Path, open_engine: OpenEngine, slots: int
) -> None:
    options = {"context_tokens": CONTEXT, "max_slots": slots, "room_for_slots": True}
    plan = planned(smollm2, LoadOptions(**options))  # type: ignore[arg-type]
    assert plan.kv_tokens == slots * CONTEXT
    engine = open_engine(smollm2, **options)
    text = "The ferry left the island a little before seven. " * 30
    for _ in engine.generate(GenerateRequest(TextPrompt(text), max_tokens=4)):
        pass
    info = engine.info()
    assert (info.context_tokens, info.kv_tokens) == (CONTEXT, slots * CONTEXT)
    assert engine.child_pid is not None
    taken = psutil.Process(engine.child_pid).memory_info().rss
    assert taken <= 1.15 * plan.total_bytes + plan.mapped_bytes
    assert taken >= 0.5 * plan.total_bytes


def test_fit_and_show_agree_on_the_kv_cache(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = read_json(capfd, "show", smollm2, "--json")
    fit = read_json(capfd, "fit", smollm2, "--ctx", str(CONTEXT), "--json")
    assert fit["kv_bytes"] == int(str(shown["kv_bytes_per_token"])) * CONTEXT
    assert "9 heads on 3 KV heads" in str(shown["attention"])


def test_windows_count_alike_in_fit_and_show(
    gemma: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = read_json(capfd, "show", gemma, "--json")
    fit = read_json(capfd, "fit", gemma, "--ctx", "8192", "--json")
    assert fit["kv_bytes"] == int(str(shown["kv_bytes_per_token"])) * 8192
    small = read_json(capfd, "fit", gemma, "--ctx", "8192", "--window-only", "--json")
    assert int(str(small["kv_bytes"])) < int(str(fit["kv_bytes"])) / 2


def test_a_context_beyond_the_trained_length_is_rejected(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(smollm2), "--ctx", "999k"]) == 2
    assert "trained for a context of 8,192 tokens" in capfd.readouterr().err


def test_four_bit_keys_of_qwen_are_warned_about(
    qwen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit = read_json(capfd, "fit", qwen, "--ctx", "2048", "--kv-type", "q4_0", "--json")
    assert "2,702" in str(fit["notes"])


def test_a_gate_of_quality_sets_the_exit_code(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["quality", str(smollm2), "--vary", "kv-type=f16,q8_0", "--only", "text"]
    command += ["--windows", "1", "--window", "256", "--quiet"]
    # One run for both: a loose limit is met, a tight one is missed.
    command += ["--gate", "top1=0.8", "--gate", "kl=0.05", "--gate", "perplexity=0.5"]
    assert run(command) == 1
    err = capfd.readouterr().err
    assert "gate missed: kv-type=q8_0: perplexity" in err
    assert "kl" not in err and "top1" not in err
