"""Metamorphic: what a request says depends on nothing but the request."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from localchat.backend_api.interface import Capabilities
from localchat.engine.request import GenerateRequest, Grammar
from tests.support.engine_core_bench import (
    Bench,
    capabilities,
    check_received,
    copying,
    peaked,
    request,
)

QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # a failure shrinks for minutes; run it with all phases then
    report_multiple_bugs=False,
)

BLOCKS = {"block_tokens": 4, "depth": 2}
KINDS: dict[str, dict[str, Any]] = {
    "slots": {},
    "slots-window": {"rewind": "last_n", "rewind_tokens": 6},
    "slots-checkpoint": {"rewind": "checkpoint", "state_bytes": 10},
    "slots-ahead": {"depth": 2},
    "blocks": {"block_tokens": 4},
    "blocks-ahead": BLOCKS,
    "blocks-windows": {**BLOCKS, "window_tokens": 6, "window_blocks": 80},
    "blocks-few-windows": {**BLOCKS, "window_tokens": 9, "window_blocks": 24},
}


GRAMMARS = (
    Grammar("regex", "(ab|ba)*c?d"),
    Grammar("regex", "[a-f]{3,25}|é+"),
    Grammar("regex", "abcdefabcdefabcdef[ab]+fedcbafedcba(c|d)"),
    Grammar("lark", 'start: "a" rest* "é"\nrest: "bb" | "cc" | "dd" "ee"'),
    Grammar("json_schema", '{"enum": ["abba", "abbb", "cdcd", 1, null]}'),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["aa", "ab"]}, "maxItems": 2}'),
    Grammar("json_object"),
)


def words(low: int, high: int) -> st.SearchStrategy[str]:
    return st.text("ab", min_size=low, max_size=high)


@st.composite
def requests(draw: st.DrawFn, most: int = 40) -> GenerateRequest:
    prompt = draw(st.sampled_from(["", "abab", "aabbaabb" * 3])) + draw(words(1, most))
    extra: dict[str, Any] = {}
    if draw(st.booleans()):
        extra |= {"temperature": 1.0, "seed": draw(st.integers(0, 9))}
    if draw(st.booleans()):
        extra |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    if draw(st.booleans()):
        extra |= {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ("c",)}
        extra |= {"xtc_probability": 0.5, "top_n_sigma": 3.0, "dynatemp_range": 0.5}
    if draw(st.booleans()):
        extra |= {"stop": tuple(draw(st.lists(words(2, 4), max_size=2)))}
    if draw(st.integers(0, 3)) == 0:
        extra |= {"prompt_logprobs": draw(st.integers(0, 2)), "logprobs": 1}
    if draw(st.integers(0, 2)) == 0:
        extra |= {"grammar": draw(st.sampled_from(GRAMMARS))}
    return request(
        prompt,
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        max_tokens=draw(st.sampled_from([0, 1, 2, 9, 30])),
        salt=draw(st.sampled_from(["", "s"])),
        priority=draw(st.sampled_from([0, 0, 1])),
        speculation=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        **extra,
    )


@st.composite
def shapes(draw: st.DrawFn, kind: dict[str, Any]) -> Capabilities:
    rows = draw(st.sampled_from([1, 2, 4, 8]))
    pool = draw(st.sampled_from([112, 160, 400]))
    return capabilities(
        **kind,
        context_tokens=min(pool, 400),
        kv_tokens=pool,
        max_slots=rows + draw(st.integers(0, 1)),
        max_rows=rows,
        max_step_tokens=draw(st.sampled_from([5, 16, 64])),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@QUICK
def test_text_is_that_of_the_simulation_whatever_else_runs(kind: str, data: st.DataObject) -> None:
    can = data.draw(shapes(KINDS[kind]))
    steps = st.frozensets(st.integers(1, 40), max_size=4)
    logits = data.draw(st.sampled_from([peaked, copying]))
    bench = Bench(
        can,
        logits,
        ram=data.draw(st.sampled_from([0, 60, 100_000])),
        stumble=data.draw(steps),
        halt=data.draw(steps),
    )
    asked: list[int] = []
    for one in data.draw(st.lists(requests(), min_size=1, max_size=6)):
        asked.append(bench.ask(one))
        bench.step(data.draw(st.sampled_from([0, 0, 1, 5, 60])))
    gone = data.draw(st.sets(st.sampled_from(asked)))
    for id_ in sorted(gone):
        bench.step(data.draw(st.integers(0, 6)))
        bench.core.cancel(id_)
    bench.run_until_idle()
    for id_ in asked:
        if id_ not in gone:
            check_received(bench, id_, logits)
        else:
            assert bench.received[id_].error is None


def test_a_short_step_behind_one_that_is_taken_back_in_part_loses_nothing() -> None:
    # The room of what the second step lacked memory for is given up while the fifth, which will lack some too,
    # is in flight.
    can = capabilities(context_tokens=160, kv_tokens=160, max_rows=4, max_step_tokens=5, depth=2)
    bench = Bench(can, copying, stumble={2, 5})
    id_ = bench.ask(request("aabbaabb" * 3 + "bbabb", max_tokens=9))
    bench.run_until_idle()
    check_received(bench, id_, copying)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"seed": 3}]
)
def test_a_greedy_or_seeded_request_has_no_drafts(sampling: dict[str, Any]) -> None:
    """A step with drafts is wider, so its rows have other bits."""
    bench = Bench(capabilities(), copying)
    usual = {"temperature": 1.0, "max_tokens": 60}
    answer = bench.say(request("abcabcabcabc" * 4, **usual | sampling))
    assert answer.done.speculation.off.startswith("off ")
    assert not bench.say(request("abcabcabcabc" * 4, **usual)).done.speculation.off.startswith(
        "off "
    )
