"""Offers for a model that failed to load: the first step that suffices, another model, or the guide."""

import asyncio

from localchat.errors import DoesNotFit, LocalchatError
from localchat.fit.steps import MemoryStep
from localchat.models.resolve import GUIDE
from localchat.session.blocks import Offer
from localchat.session.context import ModelSetup, SessionContext


async def load_offers(
    context: SessionContext, setup: ModelSetup, problem: LocalchatError
) -> tuple[Offer, ...]:
    """Return what the user can do about a failed load."""
    offers: list[Offer] = []
    if isinstance(problem, DoesNotFit) and "needed_bytes" in problem.details:
        step = await _sufficient_step(context, setup)
        if step is not None:
            offers.append(Offer(step.sentence(with_flag=False), _action(step)))
    offers.append(Offer("choose another model", "model"))
    if setup.model.word != GUIDE:
        offers.append(Offer("continue with the built-in guide", f"model {GUIDE}"))
    return tuple(offers)


async def _sufficient_step(context: SessionContext, setup: ModelSetup) -> MemoryStep | None:
    """Return the first step that a chat can take and that alone frees enough memory."""
    try:
        steps = await asyncio.to_thread(context.memory_steps, setup)
    except (LocalchatError, OSError):
        return None  # The error of the load is shown already.
    for step in steps:
        # A chat runs one request at a time, so fewer slots change nothing.
        can_help = step.can_be_taken and step.suffices
        if can_help and step.name != "slots" and step.model != GUIDE:
            return step
    return None


def _action(step: MemoryStep) -> str:
    """Return the slash command that takes the step."""
    if step.model and step.is_here:
        return f"model {step.model}"
    if step.model:
        return f"pull {step.model}"
    ((key, value),) = step.settings
    return f"set {key} {value}"
