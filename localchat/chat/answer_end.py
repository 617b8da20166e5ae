"""Sentences about an answer that did not end by itself: the cause, and what to do."""

from typing import Final

from localchat.engine.events import Finished

FREQUENCY_PENALTY: Final = 0.3
"""Suggested penalty against loops.

SmolLM2-135M looped in 0 and 1 of 50 everyday prompts with it, and in 9 with a repetition penalty of 1.1.
"""

NO_TEXT: Final = "The answer has no text. Ask in other words."
"""Notice about a model that ended its answer at once, or after its reasoning."""


def ended_early(end: Finished | None) -> bool:
    """Return whether a limit or the loop guard ended an answer."""
    return end is not None and end.reason in ("length", "repetition")


def end_sentence(end: Finished, tokens: int, context_tokens: int, *, what: str = "answer") -> str:
    """Return what ended an answer. Empty if it ended by itself.

    `tokens` is the limit of the answer. `what` is the noun for it.
    """
    if end.reason == "repetition":
        if end.repetition is None or not end.repetition.chars:
            return f"The {what} only repeated itself and was ended."
        return f"{end.repetition.sentence(what)} and was ended."
    if end.reason != "length":
        return ""
    match end.limit:
        case "max_tokens":
            return f"The {what} was cut at {tokens:,} tokens (--max-tokens {tokens})."
        case "default":
            return f"The {what} was cut at {tokens:,} tokens, the default limit."
        case "context" if context_tokens:
            return f"The {what} was cut: the context of {context_tokens:,} tokens is full."
        case _:
            return f"The {what} was cut at the length limit of the server."


def end_advice(end: Finished, tokens: int, context_tokens: int) -> str:
    """Return advice for the command line. Empty if the answer ended by itself."""
    if end.reason == "repetition":
        return f"Try again with -o frequency_penalty {FREQUENCY_PENALTY}."
    if end.reason != "length":
        return ""
    if end.limit == "context":
        return f"Allow more with --ctx {max(512, 2 * context_tokens)}, or shorten the prompt."
    return f"Allow more with --max-tokens {max(200, 2 * tokens)}."
