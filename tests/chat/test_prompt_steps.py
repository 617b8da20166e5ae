"""Steps for a prompt longer than the context, with memory told by the engine."""

import msgspec

from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import EngineInfo, MemoryParts
from localchat.fit.steps import MemoryStep
from tests.support.cli_program import INFO

MB = 10**6
PARTS = MemoryParts(weights_bytes=1600 * MB, kv_bytes=400 * MB, compute_bytes=0, overhead_bytes=0)


def steps(prompt: int, **changes: object) -> dict[str, MemoryStep]:
    """The steps on an engine whose 4,096 tokens take 400 MB, with 2.2 GB free before its load."""
    usual: dict[str, object] = {
        "actual": PARTS,
        "actual_bytes": 2000 * MB,
        "free_bytes": 2200 * MB,
        "kv_types": ("f16", "q8_0"),
        "layers": 16,
        "kv_tokens": 4096,
    }
    info: EngineInfo = msgspec.structs.replace(INFO, **usual | changes)
    return {step.name: step for step in prompt_steps(prompt, info)}


def test_steps_that_help_come_in_order_and_the_input_can_always_be_cut() -> None:
    found = steps(9000)
    assert list(found) == ["shorter_input", "kv_type", "context", "model"]
    assert found["shorter_input"].gained_tokens == 9000 - 4096 + 1
    assert (
        found["model"].sentence() == "another model: one with a longer context; enough (-m MODEL)"
    )


def test_a_coarser_cache_is_not_proposed_where_a_longer_context_is_enough() -> None:
    assert list(steps(5000)) == ["shorter_input", "context", "model"]


def test_a_cache_that_was_rounded_up_does_not_make_a_longer_context_look_costly() -> None:
    small = msgspec.structs.replace(PARTS, kv_bytes=256 * MB // 10)
    context = steps(100, actual=small, kv_tokens=1, context_tokens=1)["context"]
    assert "2,048 tokens rather than 1, which takes 205 MB more" in context.change


def test_memory_that_is_free_bounds_the_context() -> None:
    fits, short = steps(5000)["context"], steps(9000)["context"]
    assert fits.suffices
    assert fits.settings == (("context_length", "6144"),)
    assert fits.gained_tokens == 6144 - 4096
    longest = 600 * MB * 4096 // (400 * MB)  # all that is left for a cache
    assert not short.suffices
    assert short.settings == (("context_length", str(longest)),)
    assert short.gained_tokens == longest - 4096


def test_a_coarser_cache_lets_in_what_a_longer_one_cannot() -> None:
    found = steps(9000)["kv_type"]
    assert found.suffices
    assert dict(found.settings) == {"kv_cache_type": "q8_0", "context_length": "10240"}
    assert found.gained_bytes == round(400 * MB * (1 - 34 / 64))
    assert found.gained_tokens == 10240 - 4096


def test_nothing_but_another_model_helps_beyond_its_training() -> None:
    found = steps(40_000)
    assert list(found) == ["shorter_input", "model"]
    assert "trained for 32,768" in found["model"].change
