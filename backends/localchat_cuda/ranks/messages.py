"""Messages between rank 0 and the other ranks, pickled over a private pipe.

Rank 0 sends the steps that it launches, in their order. The others launch the same steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from localchat.backend_api.interface import LoadBlock, LoadRequest, Mask, SaveBlock, StepPlan
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.runner.input_batch import TokenSpan


@dataclass(frozen=True, slots=True)
class RankJob:
    """Model, device and peers of a rank."""

    rank: int
    ranks: int
    device: str
    config: ModelConfig
    """Shape of the whole model."""
    path: Path | None
    """Folder of the checkpoint; None: random weights."""
    request: LoadRequest
    meeting: Path
    """File through which the ranks find each other."""
    host_memory: int
    """File descriptor of the host blocks, which all ranks map. -1: the load has none."""


class Loaded(NamedTuple):
    """A rank has loaded its weights, or in the answer of rank 0, all have."""

    host_blocks: bool
    """Their host blocks are usable."""


class RankFailed(NamedTuple):
    """A rank ends because of an error."""

    kind: str
    """Name of the error's class."""
    message: str
    hint: str = ""


class Copied(NamedTuple):
    """The copies between pages and host blocks of a step are complete on a rank."""

    number: int
    """Number of the Launch message."""


class Launch(NamedTuple):
    """A step to launch."""

    number: int
    """Counts the messages, from 1."""
    plan: StepPlan
    """Plan without masks, which only rank 0 applies."""
    same_rows: bool = False
    """Rows and positions are those of an earlier plan, and are left out."""

    @property
    def copies_blocks(self) -> bool:
        """True if the step copies host blocks."""
        return any(isinstance(operation, SaveBlock | LoadBlock) for operation in self.plan.memory)


class LaunchPadding(NamedTuple):
    """A step of padding to run, whose graph may be captured."""

    spans: Sequence[TokenSpan]
    kind: str


class Stop(NamedTuple):
    """The model is closed."""


class PlanEncoder:
    """Makes messages of plans. Rows that a plan repeats are not sent again."""

    def __init__(self) -> None:
        self._number = 0
        self._plan = StepPlan(0)

    def encode(self, plan: StepPlan) -> Launch:
        """Return the message of the next plan."""
        self._number += 1
        masks = tuple(Mask(mask.index, b"") for mask in plan.masks)
        same = bool(plan.moved) and plan.rows is self._plan.rows
        if not same:
            self._plan = plan
            return Launch(self._number, structs.replace(plan, masks=masks))
        plan = structs.replace(plan, rows=(), positions=(), masks=masks)
        return Launch(self._number, plan, same_rows=True)


class PlanDecoder:
    """Restores the plans of messages, with the same object for rows that a plan repeats."""

    def __init__(self) -> None:
        self._plan = StepPlan(0)

    def decode(self, message: Launch) -> StepPlan:
        """Return the plan of the next message."""
        if message.same_rows:
            last = self._plan
            return structs.replace(message.plan, rows=last.rows, positions=last.positions)
        self._plan = message.plan
        return message.plan
