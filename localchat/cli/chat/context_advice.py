"""Advice for a prompt that is longer than the context, in order of what it costs the user."""

from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import Engine
from localchat.errors import ContextExceeded, LocalchatError
from localchat.fit.steps import MemoryStep, step_lines


def steps_for(problem: ContextExceeded, engine: Engine) -> tuple[MemoryStep, ...]:
    """The steps for a refused prompt; none where its numbers are not known."""
    try:
        info = engine.info()
    except LocalchatError:
        return ()  # the engine is gone; its own message must do
    prompt = problem.details.get("prompt_tokens")
    context = problem.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return ()
    return prompt_steps(prompt, info, context)


def with_advice(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """Add both token counts and the remedies on this engine to a refusal."""
    steps = steps_for(problem, engine)
    if not steps:
        return problem
    about = "at least " if problem.details.get("at_least") else ""
    prompt = problem.details["prompt_tokens"]
    context = problem.details["context_tokens"]
    return ContextExceeded(
        f"the prompt has {about}{prompt:,} tokens and the context holds {context:,}",
        hint="\n".join(step_lines(steps)),
        **problem.details,
    )
