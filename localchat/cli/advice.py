"""What helps when a prompt is longer than the context, in the order in which it costs the user least."""

from localchat.engine.engine import Engine, EngineInfo
from localchat.errors import ContextExceeded, LocalchatError
from localchat.fit.kv_names import smaller


def with_advice(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """The same refusal with both numbers and with what to do on this engine."""
    try:
        info = engine.info()
    except LocalchatError:
        return problem  # the engine is gone; its own words must do
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
    if info.backend == "remote":
        return (
            f"1. shorten the input by {prompt - context + 1:,} tokens or more",
            "2. the server decides on its context: start it with a longer one, or ask another",
        )
    return (
        f"1. shorten the input by {prompt - context + 1:,} tokens or more",
        f"2. {_smaller_kv(context, info)}",
        f"3. {_longer_context(prompt, context, info)}",
        "4. another model with a longer context: -m MODEL",
    )


def _smaller_kv(context: int, info: EngineInfo) -> str:
    small = smaller(info.kv_type, info.kv_types)
    if small is None:
        return f"the KV cache is {info.kv_type} already"
    flag = f"--kv-type {small.kv_type}"
    if context >= info.context_train:
        return f"{flag} saves memory, but this model knows no longer context"
    return f"store the KV cache in half the memory, so that a longer context fits: {flag}"


def _longer_context(prompt: int, context: int, info: EngineInfo) -> str:
    trained = f"this model was trained for {info.context_train:,}"
    if context >= info.context_train:
        return f"a longer context is not possible: {trained}"
    if prompt >= info.context_train:
        return f"a longer context alone does not help: {trained}"
    wanted = min(info.context_train, _rounded(prompt))
    return f"a longer context, if memory allows: --ctx {wanted} ({trained})"


def _rounded(tokens: int) -> int:
    """Room for the prompt and an answer, in whole blocks of 1,024."""
    return -(-(tokens + 1024) // 1024) * 1024
