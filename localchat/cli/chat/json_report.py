"""JSON object of `--json`, and the line about the loaded model."""

from typing import Any

from localchat.cli.chat.received_answer import ReceivedAnswer
from localchat.engine.events import Finished, Timings
from localchat.engine.interface import EngineInfo
from localchat.session.answer_builder import AnswerBuilder

_TIMINGS = (
    *("load_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"),
    *("tpot_ms_p50", "tpot_ms_p95"),
)


def report(answer: ReceivedAnswer, info: EngineInfo, texts: dict[int, str]) -> dict[str, Any]:
    """Return the answer with its metrics. Metrics that an interrupted request lacks are null.

    `texts`: the text of each choice, or its code with `--extract`.
    """
    done = answer.status.done
    timings: Timings | None = None
    fingerprint = info.fingerprint
    if done is not None:
        timings = done.timings
        fingerprint = done.fingerprint
    fields: dict[str, Any] = {
        "model": info.model,
        "backend": info.backend,
        "lora": info.adapters,
        "text": texts.get(0, ""),
        **_ending(answer.choices[0]),
        "usage": _usage(answer),
        "timings": {name: getattr(timings, name, None) for name in _TIMINGS},
        "kv": _kv(answer, info),
        "speculation": _speculation(answer),
        "fingerprint": fingerprint,
    }
    if len(answer.choices) > 1:
        fields["choices"] = [
            {"text": texts.get(number, ""), **_ending(choice)}
            for number, choice in enumerate(answer.choices)
        ]
    return fields


def context_line(info: EngineInfo) -> str:
    """Describe the model, its backend and its context in one line."""
    context = f"{info.context_tokens:,}"
    if info.context_train > info.context_tokens:
        context += f" of {info.context_train:,}"
    name = " + ".join((info.model, *info.adapters))
    return f"{name} · {info.backend} · context {context} tokens"


def _ending(choice: AnswerBuilder) -> dict[str, Any]:
    """Return reasoning and end of a choice. `limit` and `repetition` are null if neither ended it."""
    end = choice.finished or Finished(0, "cancelled")
    repetition: dict[str, Any] | None = None
    if end.repetition is not None:
        repetition = {
            "text": end.repetition.piece,
            "times": end.repetition.times,
            "characters": end.repetition.chars,
        }
    return {
        "reasoning": choice.reasoning,
        "finish_reason": end.reason,
        "limit": end.limit or None,
        "repetition": repetition,
    }


def _usage(answer: ReceivedAnswer) -> dict[str, int | str]:
    status = answer.status
    if status.done:
        usage = status.done.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "why_missed": status.done.why_missed,
            "completion_tokens": usage.completion_tokens,
        }
    # The request was interrupted: report the counts that arrived.
    counts: dict[str, int | str] = {
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "why_missed": "",
        "completion_tokens": 0,
    }
    if answer.accepted:
        counts["prompt_tokens"] = answer.accepted.prompt_tokens
    if status.prefill:
        counts["cached_tokens"] = status.prefill.cached
        counts["why_missed"] = status.prefill.why_missed
    if status.metrics:
        counts["completion_tokens"] = status.metrics.completion_tokens
    return counts


def _kv(answer: ReceivedAnswer, info: EngineInfo) -> dict[str, int]:
    used, total = answer.status.kv
    if answer.status.done is None and answer.status.metrics is None:
        total = info.context_tokens
    return {"used_tokens": used, "total_tokens": total}


def _speculation(answer: ReceivedAnswer) -> dict[str, float | str | None]:
    """Return the results of drafting, named as in localchat/metrics.py."""
    status = answer.status
    accepted, drafted = status.drafts
    speedup = None
    off = ""
    if status.done is not None:
        speedup = status.done.speculation.speedup
        off = status.done.speculation.off
    elif status.metrics is not None:
        off = status.metrics.speculation_off
    return {"drafted": drafted, "accepted": accepted, "speedup": speedup, "speculation_off": off}
