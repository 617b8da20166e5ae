"""Memory plans in words."""

from dataclasses import replace

import pytest

from localchat.errors import DoesNotFit, ExitCode
from localchat.fit.hardware import Machine
from localchat.fit.memory_plan import (
    ANYWAY,
    SEE_FIT,
    MemoryPlan,
    demand,
    gpu_reserve_bytes,
    largest,
    ram_reserve_bytes,
    rounded,
    spendable_ram,
)
from localchat.fit.report import room, verdict

PLAN = MemoryPlan(
    backend="llama.cpp",
    weights_bytes=4_700_000_000,
    kv_bytes=1_000_000_000,
    compute_bytes=200_000_000,
    overhead_bytes=100_000_000,
    free_bytes=8_000_000_000,
    fits=True,
    context_tokens=8192,
    max_context_tokens=16384,
    kv_type="f16",
    flash_attention=False,
    gpu_layers=0,
    cache_ram_bytes=0,
    max_step_tokens=128,
    advice=("--ctx 4096: 5 GB in all.",),
)


def test_a_verdict_has_both_numbers_and_the_parts() -> None:
    text = "\n".join(verdict(PLAN))
    for words in (
        "Fits: needs 6.0 GB of the 8.0 GB that are free",
        "weights 4.7 GB",
        "KV 1.0 GB (f16)",
        "Up to 16,384 tokens",
    ):
        assert words in text
    assert "GPU" not in text
    offloaded = replace(PLAN, gpu_layers=9, layers=33, gpu_bytes=10**9, gpu_free_bytes=2 * 10**9)
    assert "GPU: 9 of 33 layers, 1.0 GB of 2.0 GB free." in verdict(offloaded)


def test_pages_of_the_file_beside_copied_weights_are_named() -> None:
    told = verdict(replace(PLAN, mapped_bytes=10**9))
    assert any(line.startswith("Task managers may show 1.0 GB more") for line in told)
    assert not any("Task managers" in line for line in verdict(PLAN))


def test_a_plan_that_does_not_fit_is_an_error_with_numbers_and_advice() -> None:
    assert demand(PLAN, "toy") is PLAN
    short = replace(PLAN, fits=False, free_bytes=5_000_000_000, reserve_bytes=500_000_000)
    told = r"toy with 8,192 tokens .* 6\.0 GB, and 5\.0 GB are free, besides 500 MB kept"
    with pytest.raises(DoesNotFit, match=told) as caught:
        demand(short, "toy")
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert caught.value.hint.splitlines() == ["--ctx 4096: 5 GB in all.", ANYWAY, SEE_FIT]
    assert verdict(short)[-2:] == ("--ctx 4096: 5 GB in all.", ANYWAY)
    assert ANYWAY not in verdict(replace(short, reserve_bytes=0))
    assert caught.value.details["needed_bytes"] == 6_000_000_000


@pytest.mark.parametrize("border", [0, 1, 255, 256, 257, 511, 512, 1000, 2000])
def test_the_largest_is_found_wherever_the_border_lies(border: int) -> None:
    found = largest(lambda count: count <= border, 1000)
    assert found == (1000 if border >= 1000 else border // 256 * 256)


def test_rounding_and_the_reserve() -> None:
    assert (rounded(1), rounded(256), rounded(257)) == (256, 256, 512)
    assert [gpu_reserve_bytes(count * 10**9) for count in (2, 100)] == [500_000_000, 5_000_000_000]
    totals = (1_600_000_000, 8 * 10**9, 100 * 10**9)
    machines = [Machine("x", frozenset(), 8, total, total) for total in totals]
    # A small container keeps a sixteenth free, not a third.
    assert [ram_reserve_bytes(machine) for machine in machines] == [10**8, 5 * 10**8, 5 * 10**9]
    assert spendable_ram(machines[0]) == 1_500_000_000
    assert spendable_ram(machines[0], anyway=True) == 1_600_000_000


def test_the_room_for_conversations_is_told_once_for_all_backends() -> None:
    assert "conversation" not in " ".join(verdict(PLAN))  # its room is unknown
    roomy = replace(PLAN, kv_tokens=151_552, context_tokens=32_768)
    (line,) = (line for line in verdict(roomy) if "conversations" in line)
    assert line == (
        "Its KV cache has room for 37 conversations of 4,096 tokens or 4 conversations of 32,768 tokens."
    )
    assert roomy.conversations(4096) == 37
    assert replace(roomy, fits=False).conversations(4096) == 0
    assert room(2048, 2048) == "Its KV cache has room for 1 conversation of 2,048 tokens."
