"""What helps when a prompt is longer than the context, in the order in which it costs the user least."""

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import ContextExceeded, LocalchatError
from localchat.fit.kv_types import smaller_kv_type


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
    shorter = f"shorten the input by {prompt - context + 1:,} tokens or more"
    if info.backend == "remote":
        ways = [
            shorter,
            "the server decides on its context: start it with a longer one, or ask another",
        ]
    else:
        ways = [shorter, *_memory(prompt, context, info), _another(context, info)]
    return tuple(f"{number}. {way}" for number, way in enumerate(ways, 1))


def _memory(prompt: int, context: int, info: EngineInfo) -> list[str]:
    """Ways to a longer context; none where the model knows no longer one, or none that is long enough."""
    if info.context_train and prompt >= info.context_train:
        return []
    ways = []
    if (small := smaller_kv_type(info.kv_type, info.kv_types)) is not None:
        ways.append(
            "store the KV cache in half the memory, so that a longer context fits: "
            f"--kv-type {small.kv_type}"
        )
    trained = f" ({_trained(info)})" if info.context_train else ""
    wanted = min(info.context_train or _rounded(prompt), _rounded(prompt))
    ways.append(f"a longer context, if memory allows: --ctx {wanted}{trained}")
    return ways


def _another(context: int, info: EngineInfo) -> str:
    if info.context_train and context >= info.context_train:
        return f"another model, because {_trained(info)} and its context cannot grow: -m MODEL"
    return "another model with a longer context: -m MODEL"


def _trained(info: EngineInfo) -> str:
    return f"this model was trained for {info.context_train:,}"


def _rounded(tokens: int) -> int:
    """Room for the prompt and an answer, in whole blocks of 1,024."""
    return -(-(tokens + 1024) // 1024) * 1024
