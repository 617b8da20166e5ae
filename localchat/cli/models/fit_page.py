"""Formats what `fit` found: which quantization to take, the table of them, and the memory of a load."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.cli.output import table
from localchat.fit.report import parts
from localchat.fit.report import verdict as sentences
from localchat.fit.steps import IN_ORDER, MemoryStep, step_lines
from localchat.sanitize import sanitize_line
from localchat.units import rate, size, tokens

if TYPE_CHECKING:
    from localchat.config.paths import Paths
    from localchat.fit.hardware import Machine
    from localchat.models.assess import FitReport
    from localchat.models.quantization_table import QuantizationRow

NO_SPEED: Final = "Speed unknown: it cannot be estimated on this machine"
_HEAD: Final = ("QUANTIZATION", "SIZE", "LONGEST CONTEXT", "SPEED", "LOSS")
_READING_TOKENS_PER_S: Final = 5.0
"""Rate at which people read. Slower models are no choice for a chat."""
_ROOMY_SHARE: Final = 0.75
"""Share of the memory that is free for a model without other large programs."""


class FitPage(NamedTuple):
    """What `fit` found on a model."""

    verdict: "FitReport"
    rows: "Sequence[QuantizationRow]"
    steps: tuple[MemoryStep, ...]
    context_lines: Sequence[str]
    """Memory with a usual and with the longest context."""
    is_exact: bool
    """Whether the verdict is on a quantization that the user named, or on a file of this machine."""
    memory_bytes: int = 0
    """Memory of the other computer that the plan is for. 0: it is for this computer."""
    shorter: "QuantizationRow | None" = None
    """Quantization that fits with a shorter context than the user chose."""


def page_lines(page: FitPage, paths: "Paths", machine: "Machine") -> Iterator[str]:
    """Format the page. It starts with the answer to the question that the name asks."""
    best = next((row for row in page.rows if row.recommended), None)
    load_lines = (*report_lines(page.verdict), *page.context_lines)
    if page.is_exact or not page.rows:
        # One file: does it fit?
        yield from load_lines
        yield from _other_model_lines(page, paths, machine)
        yield from _table_lines(page, best)
        if page.steps:
            yield from ("", IN_ORDER, *step_lines(page.steps))
        return
    # A model: which file of it?
    if best is None:
        yield _why_none(page)
    else:
        yield from _answer_lines(best, page.rows)
    yield from _other_model_lines(page, paths, machine)
    yield from _table_lines(page, best)
    if best is not None:
        yield from ("", *load_lines)


def _answer_lines(best: "QuantizationRow", rows: "Sequence[QuantizationRow]") -> Iterator[str]:
    """Say which quantization to take, and why."""
    plan = best.report.plan
    speed = ""
    if best.speed is not None:
        speed = f", {best.speed.words}"
    room = f"a context of up to {tokens(plan.max_context_tokens)}"
    yield f"Take {best.quantization}: {size(best.size_bytes)}, {room}{speed}."
    if best.model:
        yield f"  localchat pull {best.model}"
    if reason := _reason(best, rows):
        yield reason


def _reason(best: "QuantizationRow", rows: "Sequence[QuantizationRow]") -> str:
    """Explain the choice: what speaks against finer and coarser quantizations."""
    index = rows.index(best)
    finer = [row for row in rows[:index] if not row.gains_nothing]
    sentences = []
    if finer and not any(row.fits_a_chat for row in finer):
        sentences.append(_why_not_finer(finer[-1]))
    elif finer:
        next_finer = [row for row in finer if row.fits_a_chat][-1]
        sentences.append(f"{next_finer.quantization} fits too, but it is slower and hardly better.")
    elif rows[:index]:
        sentences.append(f"{rows[0].quantization} is larger without a visible difference.")
    if best.loses_half:
        sentences.append("A model of this size loses about half of the LOSS in the table.")
    coarser = rows[index + 1 :]
    if coarser and not coarser[0].is_worth_it:
        sentences.append(f"{coarser[0].quantization} and coarser ones answer worse.")
    elif coarser and best.is_quick:
        sentences.append("Coarser ones lose more, and this one is quick already.")
    elif coarser:
        sentences.append("Coarser ones lose more.")
    return " ".join(sentences)


def _why_not_finer(next_finer: "QuantizationRow") -> str:
    """Explain why the next finer quantization is too large."""
    plan = next_finer.report.plan
    if not plan.fits:
        return "Finer ones do not fit."
    room = tokens(plan.max_context_tokens)
    return f"{next_finer.quantization} leaves room for {room} only, too few for a conversation."


def _why_none(page: FitPage) -> str:
    """Explain why no quantization is recommended, and what would help."""
    rows = page.rows
    smallest = rows[-1]
    fitting = [row.quantization for row in rows if row.fits_a_chat]
    if fitting:
        reason = f"Only {' and '.join(fitting)} would fit, with too much loss"
    elif smallest.report.plan.fits:
        reason = f"Even {smallest.quantization} leaves too little room for a conversation"
    else:
        reason = f"Even {smallest.quantization}, {size(smallest.size_bytes)}, does not fit"
    answer = "Take another model here"
    if page.shorter is not None:
        answer = "Take another model here, or a shorter context"
    return f"{answer}. {reason}. {_what_would_help(page)}"


def _what_would_help(page: FitPage) -> str:
    """Return advice for a model of which no quantization is recommended."""
    if page.shorter is not None:
        longest = page.shorter.report.plan.max_context_tokens
        return f"{page.shorter.quantization} fits with --ctx {longest} or less."
    used_bytes = page.verdict.others_bytes
    memory_bytes = page.verdict.memory_bytes
    roomy = [
        row
        for row in page.rows
        if row.is_worth_it and row.report.plan.total_bytes < _ROOMY_SHARE * memory_bytes
    ]
    if roomy and not page.memory_bytes:
        used = f"{size(used_bytes)} of {size(memory_bytes)}"
        return f"Other programs use {used}: without them, {roomy[0].quantization} fits."
    smallest = page.rows[-1]
    free_bytes = smallest.report.plan.free_bytes
    if page.memory_bytes and smallest.size_bytes > free_bytes:
        return f"No setting makes enough room, because {size(free_bytes)} are free."
    advice = f"What makes room: localchat fit {smallest.model or page.verdict.name}"
    if page.memory_bytes:
        advice += f" --memory {page.memory_bytes / 1e9:g}"
    return advice


def _other_model_lines(page: FitPage, paths: "Paths", machine: "Machine") -> Iterator[str]:
    """Name the models that suit the machine, if this one does not fit or is slow."""
    from localchat.models.recommended_models import recommended_models

    verdict = page.verdict
    plan = verdict.plan
    speed = verdict.expected_speed
    is_slow = speed is not None and speed.tokens_per_s < _READING_TOKENS_PER_S
    if plan.missing or (plan.fits and not is_slow):
        return
    recommendations = recommended_models(paths, machine)
    if plan.fits and speed is not None:
        recommendations = tuple(
            recommendation
            for recommendation in recommendations
            if (recommendation.tokens_per_s or 0) > speed.tokens_per_s
        )
    if not recommendations:
        return
    reason = ""
    if plan.fits and speed is not None:
        reason = f"{rate(speed.tokens_per_s)} is slower than people read. "
    computer = "this computer"
    if page.memory_bytes:
        computer = f"a computer with {page.memory_bytes / 1e9:g} GB"
    yield f"{reason}Models that suit {computer} better:"
    rows = [
        (recommendation.command, recommendation.summary)
        for recommendation in reversed(recommendations)
    ]
    for line in table((), rows):
        yield f"  {line}"


def _table_lines(page: FitPage, best: "QuantizationRow | None") -> Iterator[str]:
    """Format the table of quantizations, and explain its columns."""
    rows = page.rows
    if len(rows) < 2:
        yield from _assumption_lines(page)
        return
    cells = []
    for row in rows:
        plan = row.report.plan
        speed = "-"
        if row.speed is not None:
            speed = rate(row.speed.tokens_per_s)
        context = "does not fit"
        if plan.fits:
            context = f"{plan.max_context_tokens:,}"
        name = row.quantization + (" *" if row.recommended else "")
        cells.append((name, size(row.size_bytes), context, speed, f"{row.loss_percent:g} %"))
    yield ""
    yield from table(_HEAD, cells, right=(1, 2, 3, 4))
    if best is not None and page.is_exact:
        yield f"* {_how_to_get(best)}"
    yield (
        "LOSS: how much worse it predicts text than the unquantized model (perplexity), as usual for 8B. "
        "Small models lose more, large ones less."
    )
    yield from _assumption_lines(page)


def _assumption_lines(page: FitPage) -> Iterator[str]:
    """Say what is assumed of another computer."""
    if page.memory_bytes:
        used = size(page.verdict.others_bytes)
        yield (
            f"This is for {page.memory_bytes / 1e9:g} GB without a GPU, of which other programs use {used}. "
            "SPEED: with the memory bandwidth of this computer."
        )


def _how_to_get(best: "QuantizationRow") -> str:
    if best.subject.path is not None:
        return "Take this one, which is here."
    if best.model:
        return f"Take this one: localchat pull {best.model}"
    return f"Take this one: localchat quantize MODEL --type {best.quantization} makes it."


def report_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the verdict, and the speed of a model that fits."""
    first, shares, *remarks = sentences(verdict.plan)
    yield f"{sanitize_line(verdict.name)} {first[0].lower()}{first[1:]}"
    if verdict.plan.missing:
        yield parts(verdict.plan)
    else:
        yield from (shares, verdict.why)
    yield from (*remarks, *verdict.alternatives)
    if verdict.plan.fits:
        yield from speed_lines(verdict)


def speed_lines(verdict: "FitReport") -> Iterator[str]:
    """Format the expected speed and its source."""
    speed = verdict.expected_speed
    if speed is not None:
        yield f"{speed.words[0].upper()}{speed.words[1:]}, {speed.basis}."
    else:
        yield f"{NO_SPEED}."
