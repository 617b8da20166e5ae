"""Advice for a prompt that is longer than the context, cheapest first."""

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import ContextExceeded, LocalchatError
from localchat.fit.kv_types import smaller_kv_type


def with_advice(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """Add both token counts and the remedies on this engine to a refusal."""
    try:
        info = engine.info()
    except LocalchatError:
        return problem  # the engine is gone; its own message must do
    prompt, context = problem.details.get("prompt_tokens"), problem.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return problem
    about = "at least " if problem.details.get("at_least") else ""
    return ContextExceeded(
        f"the prompt has {about}{prompt:,} tokens and the context holds {context:,}",
        hint="\n".join(_steps(prompt, context, info)),
        **problem.details,
    )


def _steps(prompt: int, context: int, info: EngineInfo) -> tuple[str, ...]:
    shorter = f"shorten the input by {prompt - context + 1:,} tokens or more"
    if info.backend == "remote":
        steps = [
            shorter,
            "the server decides on its context: start it with a longer one, or ask another",
        ]
    else:
        steps = [shorter, *_memory(prompt, context, info), _another(context, info)]
    return tuple(f"{number}. {step}" for number, step in enumerate(steps, 1))


def _memory(prompt: int, context: int, info: EngineInfo) -> list[str]:
    """Steps to a longer context; none if the model was trained for a shorter one."""
    if info.context_train and prompt >= info.context_train:
        return []
    steps = []
    if (small := smaller_kv_type(info.kv_type, info.kv_types)) is not None:
        steps.append(
            "store the KV cache in half the memory, so that a longer context fits: "
            f"--kv-type {small.kv_type}"
        )
    trained = f" ({_trained(info)})" if info.context_train else ""
    needed = min(info.context_train or _rounded(prompt), _rounded(prompt))
    steps.append(f"a longer context, if memory allows: --ctx {needed}{trained}")
    return steps


def _another(context: int, info: EngineInfo) -> str:
    if info.context_train and context >= info.context_train:
        return f"another model, because {_trained(info)} and its context cannot grow: -m MODEL"
    return "another model with a longer context: -m MODEL"


def _trained(info: EngineInfo) -> str:
    return f"this model was trained for {info.context_train:,}"


def _rounded(tokens: int) -> int:
    """Tokens for the prompt and an answer, rounded up to a multiple of 1,024."""
    return -(-(tokens + 1024) // 1024) * 1024
