"""Object of `--json`, and the line about the loaded model."""

from typing import Any

from localchat.cli.chat.render_answer import ReceivedAnswer
from localchat.engine.events import Timings
from localchat.engine.interface import EngineInfo
from localchat.fit.report import room

_TIMINGS = (
    *("load_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"),
    *("tpot_ms_p50", "tpot_ms_p95"),
)


def report(
    answer: ReceivedAnswer, info: EngineInfo, choices: int, texts: dict[int, str]
) -> dict[str, Any]:
    """The answer with its metrics, ready for JSON. Metrics that an interrupted request lacks are null.

    `texts`: the text to report, by choice (with `--extract`, the code)."""
    done = answer.done
    timings: Timings | None = done.timings if done else None
    fields: dict[str, Any] = {
        "model": info.model,
        "backend": info.backend,
        "text": texts.get(answer.chosen, ""),
        "reasoning": answer.reasoning[answer.chosen],
        "finish_reason": _reason(answer, answer.chosen),
        **_end(answer, answer.chosen),
        "usage": _usage(answer),
        "timings": {name: getattr(timings, name, None) for name in _TIMINGS},
        "kv": _kv(answer, info),
        "speculation": _speculation(answer),
        "fingerprint": done.fingerprint if done else info.fingerprint,
    }
    if choices > 1:
        fields["choices"] = [
            {
                "text": texts.get(choice, ""),
                "reasoning": answer.reasoning[choice],
                "finish_reason": _reason(answer, choice),
                **_end(answer, choice),
            }
            for choice in range(choices)
        ]
    return fields


def context_line(info: EngineInfo) -> str:
    """Describe the model, its backend and its context in one line."""
    trained = f" of {info.context_train:,}" if info.context_train > info.context_tokens else ""
    return f"{info.model} · {info.backend} · context {info.context_tokens:,}{trained} tokens"


def room_line(info: EngineInfo) -> str:
    """How many conversations the KV cache of the loaded model holds; empty where that is unknown."""
    return room(info.kv_tokens, info.context_tokens)


def _reason(answer: ReceivedAnswer, choice: int) -> str:
    return answer.reasons.get(choice, "cancelled")


def _end(answer: ReceivedAnswer, choice: int) -> dict[str, Any]:
    """Which limit ended the answer, and what it repeated; null where that was not its end."""
    end = answer.ends.get(choice)
    repetition = end.repetition if end else None
    return {
        "limit": (end.limit if end else "") or None,
        "repetition": repetition
        and {"text": repetition.piece, "times": repetition.times, "characters": repetition.chars},
    }


def _usage(answer: ReceivedAnswer) -> dict[str, int | str]:
    if answer.done:
        usage = answer.done.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "why_missed": answer.done.why_missed,
            "completion_tokens": usage.completion_tokens,
        }
    return {
        "prompt_tokens": answer.accepted.prompt_tokens if answer.accepted else 0,
        "cached_tokens": answer.prefill.cached if answer.prefill else 0,
        "why_missed": answer.prefill.why_missed if answer.prefill else "",
        "completion_tokens": answer.metrics.completion_tokens if answer.metrics else 0,
    }


def _kv(answer: ReceivedAnswer, info: EngineInfo) -> dict[str, int]:
    if answer.done:
        used = answer.done.kv_used_tokens
        total = answer.done.kv_total_tokens
    elif answer.metrics:
        used = answer.metrics.kv_used_tokens
        total = answer.metrics.kv_total_tokens
    else:
        used = 0
        total = info.context_tokens
    return {"used_tokens": used, "total_tokens": total}


def _speculation(answer: ReceivedAnswer) -> dict[str, float | str | None]:
    """Results of drafting, by the names in localchat/metrics.py."""
    counted = answer.done.speculation if answer.done else answer.metrics
    off = answer.metrics.speculation_off if answer.metrics else ""
    return {
        "drafted": counted.drafted if counted else 0,
        "accepted": counted.accepted if counted else 0,
        "speedup": answer.done.speculation.speedup if answer.done else None,
        "speculation_off": answer.done.speculation.off if answer.done else off,
    }
