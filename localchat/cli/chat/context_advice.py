"""Advice for a prompt that exceeds the context, cheapest step first."""

from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import Engine
from localchat.errors import ContextExceeded, LocalchatError
from localchat.fit.steps import MemoryStep, step_lines


def steps_for(problem: ContextExceeded, engine: Engine) -> tuple[MemoryStep, ...]:
    """Return the steps for a rejected prompt, or none if its token counts are unknown."""
    try:
        info = engine.info()
    except LocalchatError:
        return ()  # the engine has ended, and its message must suffice
    prompt = problem.details.get("prompt_tokens")
    context = problem.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return ()
    return prompt_steps(prompt, info, context)


def with_advice(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """Add both token counts and the possible steps to a rejection."""
    steps = steps_for(problem, engine)
    if not steps:
        return problem
    qualifier = "at least " if problem.details.get("at_least") else ""
    prompt = problem.details["prompt_tokens"]
    context = problem.details["context_tokens"]
    return ContextExceeded(
        f"the prompt has {qualifier}{prompt:,} tokens and the context holds {context:,}",
        hint="\n".join(step_lines(steps)),
        **problem.details,
    )
