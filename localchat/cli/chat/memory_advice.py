"""Steps that make room for a load or a prompt, as the errors list them."""

from localchat.chat.prompt_steps import prompt_steps
from localchat.cli.resolve import Setup, chat_slots, subject_of
from localchat.engine.interface import Engine
from localchat.errors import ContextExceeded, DoesNotFit, LocalchatError
from localchat.fit.steps import IN_ORDER, MemoryStep, step_lines
from localchat.models.resolve import planned_load


def add_load_steps(problem: DoesNotFit, setup: Setup) -> None:
    """Add the steps for a load to the hint of an error."""
    from localchat.fit.memory_plan import SEE_FIT

    if "needed_bytes" in problem.details and (steps := _load_steps(setup)):
        others = [line for line in problem.hint.splitlines() if line != SEE_FIT]
        problem.hint = "\n".join((*others, IN_ORDER, *step_lines(steps)))


def _load_steps(setup: Setup) -> tuple[MemoryStep, ...]:
    """Return the steps for the load of a setup. None for remote models and failed plans."""
    # These modules probe the hardware and read the catalog, so only a failed load imports them.
    from localchat.backend_api.registry import usable_machine
    from localchat.models.substitutes import memory_steps

    settings = setup.settings
    # A third-party backend class plans its own memory.
    if setup.model.remote is not None or ":" in (settings.backend or ""):
        return ()
    options = planned_load(settings, setup.paths, max_slots=chat_slots(settings))
    try:
        subject = subject_of(setup.model, settings)
        return memory_steps(subject, options, usable_machine(), setup.paths, setup.app.environ)
    except LocalchatError:
        return ()  # the load itself reports the error


def with_prompt_steps(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """Add both token counts and the steps to the rejection of a prompt, if known."""
    prompt = problem.details.get("prompt_tokens")
    context = problem.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return problem
    try:
        steps = prompt_steps(prompt, engine.info(), context)
    except LocalchatError:
        return problem  # the engine has ended, and its message must suffice
    qualifier = "at least " if problem.details.get("at_least") else ""
    return ContextExceeded(
        f"the prompt has {qualifier}{prompt:,} tokens and the context holds {context:,}",
        hint="\n".join(step_lines(steps)),
        **problem.details,
    )
