"""Exact mode: the class of rows, and the chunks of a prompt."""

import pytest

from localchat.backend_api.interface import RowClass
from localchat.core.scheduler.deterministic import EXACT_CHUNK_TOKENS, ExactPolicy, decode_class
from localchat.core.scheduler.step_builder import StepBuilder
from tests.support.engine_core_bench import Bench, capabilities, request

ONE, ROOMY, WIDE = RowClass(1, 1), RowClass(2, 7), RowClass(8, 64)


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [((), None), ((ONE,), ONE), ((ONE, ROOMY, WIDE), ROOMY), ((ROOMY, WIDE), ROOMY)],
)
def test_the_narrowest_class_with_room_for_drafts_is_chosen(
    classes: tuple[RowClass, ...], wanted: RowClass | None
) -> None:
    assert decode_class(capabilities(equal_rows=classes)) == wanted


def test_without_classes_exact_requests_need_no_steps_of_their_own() -> None:
    bench = Bench(capabilities())
    sequence = bench.requests[bench.ask(request("abc", exact=True))].sequences[0]
    assert not ExactPolicy(capabilities()).applies_to(sequence)
    assert ExactPolicy(capabilities(equal_rows=(ROOMY,))).applies_to(sequence)


@pytest.mark.parametrize("launched", [0, 1, EXACT_CHUNK_TOKENS - 1, EXACT_CHUNK_TOKENS])
def test_a_prefill_chunk_ends_at_a_multiple_wherever_it_begins(launched: int) -> None:
    can = capabilities(equal_rows=(ROOMY,), max_step_tokens=128)
    bench = Bench(can)
    sequence = bench.requests[bench.ask(request("a" * 200, exact=True))].sequences[0]
    sequence.launched = launched
    step = StepBuilder(100)
    assert ExactPolicy(can).prefill_row(step, [sequence], None) is sequence
    assert (launched + step.tokens_left) % EXACT_CHUNK_TOKENS == 0
    assert step.pad_to == ROOMY.low
