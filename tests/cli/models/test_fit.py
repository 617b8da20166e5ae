"""fit: the planner's verdict in words and JSON, on simulated machines."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat.fit.hardware import Gpu, Machine
from tests.support.cli_program import SCENARIOS
from tests.support.cuda_configs import QWEN25
from tests.support.gguf_files import Q4_0, Size, llama
from tests.support.memory_plans import GB
from tests.support.ram_bandwidth import put_bandwidth
from tests.support.terminal_screen import Call, Outcome

EIGHT_B = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
SMALL = Machine("small", frozenset({"avx2"}), 4, 8 * GB, 6 * GB)
NAMES = {
    *("weights_bytes", "kv_bytes", "compute_bytes", "overhead_bytes", "free_bytes", "fits"),
    *("backend", "gpu_layers", "max_context_tokens", "expected_tokens_per_s", "advice"),
}
BANDWIDTH = 20 * GB
Fit = Callable[..., Outcome]


@pytest.fixture
def eight_b(tmp_path: Path) -> Path:
    """An 8B model in Q4_0, of nothing."""
    return llama(EIGHT_B).sparse(tmp_path / "8b.gguf")


@pytest.fixture
def fit(call: Call, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """`localchat fit` on a machine of our choice."""

    def asked(machine: Machine, *args: str | Path) -> Outcome:
        monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: machine)
        put_bandwidth(monkeypatch, BANDWIDTH)
        return call(SCENARIOS["hello"], "fit", *args, named=False)

    return asked


def told(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_a_model_that_fits(fit: Fit, eight_b: Path) -> None:
    roomy = replace(SMALL, ram_total_bytes=32 * GB, ram_free_bytes=28 * GB)
    outcome = fit(roomy, eight_b, "--ctx", "8192", "--json")
    found = told(outcome)
    assert outcome.code == 0
    assert found["fits"]
    assert found.keys() >= NAMES
    assert found["context_tokens"] == 8192
    assert found["max_context_tokens"] > 8192
    assert found["others_bytes"] == 4 * GB
    assert found["weights_bytes"] >= eight_b.stat().st_size * 0.99
    text = fit(roomy, eight_b, "--ctx", "8192").out
    assert text.startswith("8b fits: ")
    assert "weights 3.9 GB · KV 1.1 GB (f16)" in text
    assert re.search(r"^About [\d.]+ tok/s \([\d.]+ to [\d.]+\), ", text, re.MULTILINE)
    assert "A context of" not in text  # the user chose one


def test_a_draft_model_counts(fit: Fit, eight_b: Path, tmp_path: Path) -> None:
    draft = llama(Size(4, 256, 4, 4, 64, 512, 1024, 2048, Q4_0)).sparse(tmp_path / "small.gguf")
    roomy = replace(SMALL, ram_total_bytes=32 * GB, ram_free_bytes=28 * GB)
    alone = told(fit(roomy, eight_b, "--ctx", "2048", "--json"))
    both = told(fit(roomy, eight_b, "--ctx", "2048", "--draft", draft, "--json"))
    assert both["total_bytes"] > alone["total_bytes"]


def test_the_expected_rate_follows_the_bytes_of_a_token(fit: Fit, eight_b: Path) -> None:
    roomy = replace(SMALL, ram_total_bytes=32 * GB, ram_free_bytes=28 * GB)
    report = told(fit(roomy, eight_b, "--json"))
    expected = report["expected_tokens_per_s"]
    # A token reads all weights but the input embedding: 4096 x 1024 in 4.5 bits.
    read_bytes = eight_b.stat().st_size - 2.4e6
    assert 1 / expected == pytest.approx(read_bytes / (0.6 * BANDWIDTH) + 32 * 0.2e-3, rel=0.01)
    low, high = report["expected_range"]
    assert low < expected < high
    text = fit(roomy, eight_b).out
    assert "About " in text and "estimated from the memory bandwidth." in text
    assert "\nA context of 4,096 tokens needs " in text


def test_a_model_that_does_not_fit_ends_with_4_and_says_what_would(fit: Fit, eight_b: Path) -> None:
    tight = replace(SMALL, ram_free_bytes=4 * GB)
    outcome = fit(tight, eight_b, "--ctx", "8192", "--json")
    found = told(outcome)
    assert outcome.code == 4
    assert not found["fits"]
    assert found["steps"]
    sentences = fit(tight, eight_b, "--ctx", "8192").out
    assert "does not fit" in sentences
    assert all(f"({step['flag']})" in sentences for step in found["steps"] if step["flag"])


def test_the_flags_reach_the_planner(fit: Fit, eight_b: Path) -> None:
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    plain = told(fit(roomy, eight_b, "--ctx", "8192", "--json"))
    small = told(fit(roomy, eight_b, "--ctx", "8192", "--kv-type", "q8_0", "--json"))
    many = told(fit(roomy, eight_b, "--ctx", "8192", "--parallel", "64", "--json"))
    assert small["kv_type"] == "q8_0"
    assert small["kv_bytes"] < 0.6 * plain["kv_bytes"]
    assert many["parallel"] == 64
    assert many["overhead_bytes"] >= plain["overhead_bytes"]
    assert fit(roomy, eight_b, "--kv-type", "q9_9").code == 2


def test_cards_are_counted_where_the_build_uses_them(
    fit: Fit, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu(0, "RTX 4090", 24 * GB, 21 * GB)
    with_card = replace(SMALL, ram_total_bytes=32 * GB, ram_free_bytes=28 * GB, gpus=(card,))
    assert told(fit(with_card, eight_b, "--json"))["gpu_layers"] == 0
    monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: True)
    found = told(fit(with_card, eight_b, "--json"))
    assert found["gpu_layers"] == found["layers"] == 33
    assert found["memory_bytes"] == (32 + 24) * GB
    assert found["others_bytes"] == (4 + 3) * GB


def test_the_users_limits_reach_the_planner(
    fit: Fit, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: True)
    card = Gpu(0, "RTX 4090", 24 * GB, 23 * GB)
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB, gpus=(card,))
    free = told(fit(roomy, eight_b, "--ctx", "8192", "--json"))
    part = told(fit(roomy, eight_b, "--ctx", "8192", "--vram-gb", "4", "--json"))
    assert free["gpu_layers"] == 33 and 0 < part["gpu_layers"] < 33
    assert part["gpu_bytes"] <= part["gpu_free_bytes"] == 4 * GB
    monkeypatch.setenv("LOCALCHAT_VRAM_GB", "4")
    assert told(fit(roomy, eight_b, "--ctx", "8192", "--json")) == part
    whole = fit(roomy, eight_b, "--ctx", "8192", "--gpu-layers", "all", "--json")
    assert whole.code == 4
    assert told(whole)["advice"][0].startswith("--vram-gb ")
    for wrong in ("0", "-1", "nan", "inf", "1e400", "8GB"):
        assert fit(roomy, eight_b, "--vram-gb", wrong).code == 2


def test_a_limit_on_the_cache_bounds_the_context(fit: Fit, eight_b: Path) -> None:
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    found = told(fit(roomy, eight_b, "--kv-gb", "0.5", "--json"))
    assert found["fits"] and found["kv_bytes"] <= GB / 2
    outcome = fit(roomy, eight_b, "--ctx", "32768", "--kv-gb", "0.5", "--json")
    found = told(outcome)
    assert outcome.code == 4 and "--kv-gb allows 500 MB" in found["missing"]
    enough = found["advice"][0].partition(":")[0].split()
    assert enough[0] == "--kv-gb"
    assert not any("smaller" in line.lower() for line in found["advice"])
    assert fit(roomy, eight_b, "--ctx", "32768", *enough).code == 0


def test_random_weights_are_judged_without_files(fit: Fit, tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN25))
    assert fit(SMALL, folder).code != 0
    outcome = fit(SMALL, folder, "--dummy-weights", "--json")
    assert outcome.code == 4
    assert told(outcome)["weights_bytes"] == pytest.approx(15.2 * GB, rel=0.01)


def test_a_file_that_cannot_be_run_is_refused(fit: Fit, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.model": "none"}
    path = llama(replace(EIGHT_B, layers=1, extra=extra)).sparse(tmp_path / "m.gguf")
    outcome = fit(SMALL, path)
    assert (outcome.code, outcome.out) == (1, "")
    assert "no vocabulary" in outcome.err


def test_a_table_compares_quantizations_for_another_computer(fit: Fit) -> None:
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    outcome = fit(roomy, "qwen2.5:7b", "--offline", "--memory", "8")
    lines = outcome.out.splitlines()
    assert outcome.code == 0
    row = next(line for line in lines if line.startswith("Q4_K_M"))
    assert row.startswith("Q4_K_M *") and "2.8 %" in row
    assert "does not fit" in next(line for line in lines if line.startswith("Q8_0"))
    assert lines[0].startswith("Take Q4_K_M: 4.7 GB, ")
    assert lines[1] == "  localchat pull qwen2.5:7b-q4_k_m"
    assert lines[2].endswith("Finer ones do not fit. Q3_K_M and coarser ones answer worse.")
    assert fit(roomy, "qwen2.5:7b", "--offline", "--memory", "8 GB").out == outcome.out
    record = told(fit(roomy, "qwen2.5:7b", "--offline", "--memory", "8", "--json"))
    assert record["memory_bytes"] == 8e9
    best = [row["model"] for row in record["quantizations"] if row["recommended"]]
    assert best == ["qwen2.5:7b-q4_k_m"]


def test_a_name_alone_means_the_quantization_to_take(fit: Fit) -> None:
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    outcome = fit(roomy, "qwen3.6:35b-a3b", "--offline", "--memory", "24")
    assert outcome.code == 0
    assert outcome.out.startswith("Take Q3_K_M: ")
    assert "loses about half of the LOSS in the table." in outcome.out.splitlines()[2]
    assert "This is for 24 GB without a GPU, of which other programs use 3.0 GB." in outcome.out
    assert "qwen3.6:35b-a3b-q3_k_m fits: " in outcome.out
    exact = fit(roomy, "qwen3.6:35b-a3b-q4_k_m", "--offline", "--memory", "24")
    assert exact.code == 4
    assert exact.out.startswith("qwen3.6:35b-a3b-q4_k_m does not fit: ")
    assert "* Take this one: localchat pull qwen3.6:35b-a3b-q3_k_m" in exact.out


def test_a_model_that_does_not_fit_names_those_that_do(fit: Fit) -> None:
    outcome = fit(SMALL, "gemma4:31b", "--offline", "--memory", "8")
    assert outcome.code == 4
    first, heading, best, *_ = outcome.out.splitlines()
    assert first.startswith("Take another model here. Even Q4_K_M, 18.7 GB, does not fit.")
    assert first.endswith("No setting makes enough room, because 5.5 GB are free.")
    assert heading == "Models that suit a computer with 8 GB better:"
    assert best.startswith("  localchat pull ")


def test_a_context_that_is_too_long_is_answered_with_the_longest_that_fits(fit: Fit) -> None:
    long = fit(SMALL, "qwen2.5:7b", "--offline", "--memory", "8", "--ctx", "32768")
    assert long.code == 4
    first = long.out.splitlines()[0]
    assert first.startswith("Take another model here, or a shorter context. Only Q3_K_M and Q2_K ")
    advice = re.search(r"Q4_K_M fits with --ctx (\d+) or less\.$", first)
    assert advice is not None
    shorter = fit(SMALL, "qwen2.5:7b", "--offline", "--memory", "8", "--ctx", advice[1])
    assert shorter.code == 0
    assert shorter.out.startswith("Take Q4_K_M: ")


def test_memory_with_a_usual_and_with_the_longest_context_is_told(fit: Fit) -> None:
    lines = fit(SMALL, "qwen2.5:7b", "--offline", "--memory", "8").out.splitlines()
    longest = re.search(r"a context of up to ([\d,]+) tokens", lines[0])
    assert longest is not None
    assert lines[-2].startswith("A context of 4,096 tokens needs ")
    assert lines[-1].startswith(f"A context of {longest[1]} tokens needs ")
    assert lines[-1].endswith(f": --ctx {longest[1].replace(',', '')}")


def test_a_longer_context_that_needs_less_memory_is_explained(fit: Fit) -> None:
    roomy = replace(SMALL, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    lines = fit(roomy, "gemma4:12b", "--offline", "--memory", "24").out.splitlines()
    assert lines[-1].startswith("A context of 262,144 tokens needs 13")
    assert lines[-1].endswith("--ctx 262144 (sliding windows are cut, as with --window-only)")


def test_a_model_that_was_trained_in_4_bits_has_no_smaller_quantization(fit: Fit) -> None:
    outcome = fit(SMALL, "gpt-oss:20b", "--offline", "--memory", "16")
    assert outcome.code == 4
    assert "quantization" not in outcome.out
    assert "This is for 16 GB without a GPU, of which other programs use 3.0 GB." in outcome.out


def test_a_slow_model_is_not_called_quick(fit: Fit) -> None:
    outcome = fit(SMALL, "qwen2.5:72b", "--offline", "--memory", "64")
    assert outcome.out.splitlines()[2].endswith(" Coarser ones lose more.")


def test_other_programs_are_blamed_if_a_coarser_quantization_fits_without_them(fit: Fit) -> None:
    busy = replace(SMALL, ram_total_bytes=25 * GB, ram_free_bytes=12 * GB)
    first = fit(busy, "qwen3.6:35b-a3b", "--offline").out.splitlines()[0]
    assert first.endswith("Other programs use 13.0 GB of 25.0 GB: without them, Q3_K_M fits.")


def test_an_impossible_memory_is_refused(fit: Fit) -> None:
    for wrong in ("0", "-1", "nan", "much", "8 TB"):
        outcome = fit(SMALL, "qwen2.5:7b", "--offline", "--memory", wrong)
        assert outcome.code == 2
        assert "as in --memory 16" in outcome.err
