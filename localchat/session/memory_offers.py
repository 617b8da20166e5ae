"""Offers of a notice about a model that cannot be loaded: steps that make room, and other models."""

import asyncio

from localchat.errors import DoesNotFit, LocalchatError
from localchat.fit.steps import MemoryStep
from localchat.models.resolve import GUIDE
from localchat.session.blocks import Offer
from localchat.session.context import ModelSetup, SessionContext


async def load_offers(
    context: SessionContext, setup: ModelSetup, problem: LocalchatError
) -> tuple[Offer, ...]:
    """What to do about a load that failed, the steps that make room first."""
    steps: tuple[MemoryStep, ...] = ()
    if isinstance(problem, DoesNotFit) and "needed_bytes" in problem.details:
        try:
            steps = await asyncio.to_thread(context.memory_steps, setup)
        except (LocalchatError, OSError):
            steps = ()  # the load's own words must do
    offers = [Offer(step.sentence(with_flag=False), _action(step)) for step in steps if _open(step)]
    offers.append(Offer("choose another model", "model"))
    if setup.model.word != GUIDE:
        offers.append(Offer("continue with the built-in guide", f"model {GUIDE}"))
    return tuple(offers)


def _open(step: MemoryStep) -> bool:
    """Whether it can be taken here: in a chat one request at a time is enough already."""
    return step.can_be_taken and step.name != "slots" and step.model != GUIDE


def _action(step: MemoryStep) -> str:
    """The command of the screen that takes it."""
    if step.model:
        return f"{'model' if step.is_here else 'pull'} {step.model}"
    ((key, value),) = step.settings
    return f"set {key} {value}"
