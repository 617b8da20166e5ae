"""Plans on their way to another rank: pickled, without masks, and with the rows that it knows already."""

import pickle

from localchat.backend_api.interface import (
    LAST,
    Enter,
    LogitsPosition,
    Mask,
    SamplingParams,
    SaveBlock,
    StepPlan,
    StepRow,
)
from localchat.backend_api.step import NewBlocks
from localchat_cuda.ranks.messages import PlanDecoder, PlanEncoder


def arrived(encoder: PlanEncoder, decoder: PlanDecoder, plan: StepPlan) -> StepPlan:
    return decoder.decode(pickle.loads(pickle.dumps(encoder.encode(plan))))


ROWS = (StepRow(1, 0, 5, LAST, (7, 8)), StepRow(2, 1, 0, (3, 4, 5), (), (9,)))
PLAN = StepPlan(
    1,
    ROWS,
    (LogitsPosition(0, 0, 1), LogitsPosition(1, 2, 2)),
    (SaveBlock(3, 4),),
    (Enter(2, 1, (3, 4, 5), 3, SamplingParams(temperature=0.5, presence_penalty=1.0)),),
    (8,),
)


def test_a_plan_arrives_as_it_was_sent() -> None:
    found = arrived(PlanEncoder(), PlanDecoder(), PLAN)
    assert found == PLAN
    assert found.rows[0].tokens is LAST
    assert found.enter[0].sampling.penalised


def test_masks_stay_on_the_first_rank_but_for_their_positions() -> None:
    def wait() -> bytes:
        raise AssertionError("the words are not computed yet")

    plan = StepPlan(1, ROWS, PLAN.positions, masks=(Mask(1, wait),))
    assert arrived(PlanEncoder(), PlanDecoder(), plan).masks == (Mask(1, b""),)


def test_moved_rows_are_those_of_the_earlier_plan() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    first = arrived(encoder, decoder, PLAN)
    blocks = (NewBlocks(0, (6,)),)
    sent = StepPlan(2, ROWS, PLAN.positions, moved=3, new_blocks=blocks)
    assert not encoder.encode(sent).plan.rows
    moved = arrived(encoder, decoder, sent)
    assert moved.rows is first.rows
    assert (moved.number, moved.moved, moved.new_blocks) == (2, 3, blocks)
    assert moved.unmoved() == sent.unmoved()


def test_a_step_that_copies_host_blocks_says_so() -> None:
    assert PlanEncoder().encode(PLAN).copies_blocks
    assert not PlanEncoder().encode(StepPlan(1)).copies_blocks
