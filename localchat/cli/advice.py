"""What helps when a prompt is longer than the context, in the order in which it costs the user least."""

from localchat.engine.engine import Engine, EngineInfo
from localchat.errors import ContextExceeded, LocalchatError


def with_advice(problem: ContextExceeded, engine: Engine) -> ContextExceeded:
    """The same refusal with both numbers and with what to do on this engine."""
    try:
        info = engine.info()
    except LocalchatError:
        return problem  # the engine is gone; its own words must do
    prompt, context = problem.details.get("prompt_tokens"), problem.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return problem
    return ContextExceeded(
        f"the prompt has {prompt:,} tokens and the context holds {context:,}",
        hint="\n".join(_steps(prompt, context, info)),
        **problem.details,
    )


def _steps(prompt: int, context: int, info: EngineInfo) -> tuple[str, ...]:
    may_grow = context < info.context_train
    small_kv = info.kv_type not in ("f16", "bf16", "f32")
    return (
        f"1. shorten the input by {prompt - context + 1:,} tokens or more",
        "2. "
        + (
            f"the KV cache is {info.kv_type} already"
            if small_kv
            else "store the KV cache in half the memory, so that a longer context fits: --kv-type q8_0"
            if may_grow
            else "--kv-type q8_0 saves memory, but this model knows no longer context"
        ),
        "3. "
        + (
            f"a longer context, if memory allows: --ctx {min(info.context_train, _rounded(prompt)):,}".replace(
                ",", ""
            )
            + f" (this model was trained for {info.context_train:,})"
            if may_grow
            else f"a longer context is not possible: this model was trained for {info.context_train:,}"
        ),
        "4. another model with a longer context: -m MODEL",
    )


def _rounded(tokens: int) -> int:
    """Room for the prompt and an answer, in whole blocks of 1,024."""
    return -(-(tokens + 1024) // 1024) * 1024
