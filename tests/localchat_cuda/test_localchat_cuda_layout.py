"""Steps laid out on the host: padding, tiles, shapes."""

import pytest
import torch

from localchat_cuda.inbox import Inbox
from localchat_cuda.layout import Sizes, Stretch, inputs_of, lay_out, put
from localchat_cuda.paging import Inputs
from localchat_cuda.state import StateTable

CPU = torch.device("cpu")
SIZES = Sizes(4, 2, 64, 64, 4)
SCRATCH_PAGE = 99


def inputs(stretches: list[Stretch], sizes: Sizes = SIZES) -> tuple[Inputs, StateTable]:
    table = StateTable(4, 8192, 64, SCRATCH_PAGE, CPU)
    inbox = Inbox(100_000, 1, CPU)
    inbox.begin()
    layout = lay_out(stretches, 0, sizes, table.scratch)
    places = put(layout, inbox, table.columns, table.scratch, table.nothing)
    inbox.send()
    return inputs_of(layout, places, inbox, table.known, table.tables, None), table


@pytest.mark.parametrize("count", [17, 65, 257, 1025, 2904, 4096])
@pytest.mark.parametrize("others", [0, 3])
def test_padding_of_prompt_chunks_writes_to_the_scratch_page_alone(count: int, others: int) -> None:
    step, table = inputs([Stretch(0, 64, count), *[Stretch(1 + i, 9, 1) for i in range(others)]])
    padding = step.slots == table.scratch
    pages = table.tables[step.slots.long(), step.positions.long() // 64][padding]
    assert set(pages.tolist()) <= {SCRATCH_PAGE}
    assert int(step.batch.counts.sum()) == step.ids.shape[0]
    assert int((~padding).sum()) == count + others
