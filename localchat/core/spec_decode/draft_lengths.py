"""Lengths of the drafts of a step: those with which its sequences are expected to go on fastest."""

from collections.abc import Sequence
from math import log

from localchat.core.spec_decode.step_cost import CostModel

_WORTH = 1.02
"""Drafts that promise less than this over a plain step are not worth the risk."""


def best_lengths(
    chances: Sequence[Sequence[float]],
    rows: int,
    cost: CostModel,
    most: int,
    *,
    again: int = 0,
    rewinds: bool = True,
    wait_s: float = 0.0,
    fair: bool = True,
) -> tuple[list[int], float]:
    """The length of each draft, and the tokens a second that are expected of the step with them.

    `chances`: by draft, the probability that so many of its tokens are accepted, which only falls. `rows`:
    tokens of the step without drafts, `again` of which were computed before. `most`: drafted tokens in all.
    `rewinds`: rejected tokens are taken back; otherwise the accepted ones before them are computed again.
    `wait_s`: how much longer a step with drafts takes because nothing can be launched ahead of it.

    All sequences wait for the whole step. `fair`: one which gains ten tokens may not cost seven others half of
    their speed, so that the product of all speeds is made as large as possible (proportional fairness, Kelly
    1997); otherwise their sum, which costs the others little where each row of a step costs alike.
    """
    streams = max(rows - again, 1)
    ranked = sorted(_gains(chances))
    plain_s = cost.seconds(rows)
    gained = 0.0
    expected = float(streams)
    redone = 0.0
    most_gained = -sum(gain for gain, _, _ in ranked)
    if not fair:
        more = sum(chances[number][place] for _, place, number in ranked[:most])
        most_gained = streams * log(1 + more / streams)
    best = 0
    best_gain = streams * log(_WORTH)
    rate = streams / plain_s * _WORTH
    width = 0
    seconds = 0.0
    for drafted, (gain, place, number) in enumerate(ranked[:most], 1):
        chance = chances[number][place]
        expected += chance
        gained -= gain
        if (padded := cost.padded(rows + drafted)) != width or not rewinds:
            width = padded
            seconds = cost.seconds(padded)
        if not rewinds:
            before = chances[number][place - 1] if place else 1.0
            redone += (before - chance) * (place + 1)
            seconds += redone * (seconds - plain_s) / drafted
        lost = streams * log((seconds + wait_s) / plain_s)
        if most_gained - lost <= best_gain:
            break  # not even all of them would bring back what so wide a step costs
        gain = (gained if fair else streams * log(expected / streams)) - lost
        if gain > best_gain:
            best = drafted
            best_gain = gain
            rate = expected / (seconds + wait_s)
    lengths = [0] * len(chances)
    for _, _, number in ranked[:best]:
        lengths[number] += 1
    return lengths, rate


def could_pay(
    rows: int, cost: CostModel, most: int, *, again: int = 0, wait_s: float = 0.0
) -> bool:
    """Whether drafts would pay if all of them were right, and each sequence had as many.

    The rest as in `best_lengths`. Asked first, since looking for drafts of many sequences costs the host a
    tenth of a small model's step.
    """
    streams = max(rows - again, 1)
    plain_s = cost.seconds(rows)
    drafted = 1
    while drafted <= most:
        if 1 + drafted / streams > _WORTH * (cost.seconds(rows + drafted) + wait_s) / plain_s:
            return True
        drafted += max(1, drafted // 2)
    return False


def _gains(chances: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Gain, place and draft of each token.

    The gain is that in the logarithm of its sequence's tokens; negative, so that the most comes first.
    """
    gains: list[tuple[float, int, int]] = []
    for number, draft in enumerate(chances):
        tokens = 1.0
        for place, chance in enumerate(draft):
            gains.append((-log(1 + chance / tokens), place, number))
            tokens += chance
    return gains
