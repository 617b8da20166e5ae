"""Quality comparison: opens variants one after the other, measures them, and compares with the first."""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import LocalchatError, UsageError
from localchat.measure import tasks
from localchat.measure.perplexity import (
    Divergence,
    ScoredWindow,
    Scorer,
    perplexity,
    windows,
)
from localchat.measure.records import QualitySpec, TaskOutcome, VariantQuality
from localchat.measure.variants import BenchVariant
from localchat.measure.workload import TokenScale, needle_text, prose

TESTS: Final = ("text", "json", "tools", "needles", "questions", "speed")
_SAMPLE_WORDS: Final = 400


class QualityProgress(NamedTuple):
    """Position within a comparison."""

    variant: str
    step: str
    done: int
    total: int


OpenTarget = Callable[[BenchVariant], AbstractContextManager[Engine]]


@dataclass(slots=True)
class Comparison:
    """Measures the variants of a spec in order."""

    spec: QualitySpec
    text: str
    questions: tuple[tasks.ExamQuestion, ...]
    open_target: OpenTarget
    show: Callable[[QualityProgress], None]
    measured: list[VariantQuality] = field(default_factory=list)
    """Complete variants, also after an error."""
    base_windows: list[ScoredWindow] = field(default_factory=list)
    """Scored windows of the first variant."""
    _done: int = 0

    def run(self) -> None:
        """Measure all variants. Raises LocalchatError."""
        with tempfile.TemporaryDirectory(prefix="localchat-quality-") as folder:
            for variant in self.spec.variants:
                self._report(variant, "loading")
                with self.open_target(variant) as engine:
                    run = _VariantRun(self, variant, engine, Path(folder))
                    self.measured.append(run.measure())

    def start_step(self, variant: BenchVariant, step: str) -> None:
        """Report the start of a step."""
        self._report(variant, step)
        self._done += 1

    def _report(self, variant: BenchVariant, step: str) -> None:
        total = max(self._steps_per_variant() * len(self.spec.variants), self._done, 1)
        self.show(QualityProgress(variant.name, step, self._done, total))

    def _steps_per_variant(self) -> int:
        """Estimate the steps. A text may have fewer windows, and tests may be skipped."""
        spec = self.spec
        counts = {
            "text": spec.most_windows,
            "json": spec.tasks,
            "tools": spec.tasks,
            "needles": len(spec.needle_lengths) * spec.needle_depths,
            "questions": len(self.questions),
            "speed": 1,
        }
        return sum(counts[test] for test in spec.tests)


@dataclass(slots=True)
class _VariantRun:
    """Measurement of one variant."""

    comparison: Comparison
    variant: BenchVariant
    engine: Engine
    folder: Path
    left_out: list[str] = field(default_factory=list)

    def measure(self) -> VariantQuality:
        spec = self.comparison.spec
        figures: dict[str, Any] = {}
        if "text" in spec.tests:
            figures |= self._text()
        if "json" in spec.tests:
            figures["json"] = self._tasks("JSON", range(spec.tasks), tasks.json_outcome)
        if "tools" in spec.tests:
            figures["tools"] = self._tasks("tool calls", range(spec.tasks), tasks.tool_outcome)
        info = self.engine.info()
        if "needles" in spec.tests:
            figures["needles"] = self._needles(info)
        if "questions" in spec.tests:
            questions = self.comparison.questions
            outcome = partial(tasks.question_outcome, questions=questions)
            figures["questions"] = self._tasks("questions", range(len(questions)), outcome)
        if "speed" in spec.tests:
            self.comparison.start_step(self.variant, "speed")
            figures["tokens_per_s"] = tasks.decode_rate(self.engine)
        return VariantQuality(
            variant=self.variant,
            model=info.model,
            backend=info.backend,
            quantization=info.quantization,
            kv_type=info.kv_type,
            file_bytes=info.file_bytes,
            context_tokens=info.context_tokens,
            left_out=tuple(self.left_out),
            **figures,
        )

    def _text(self) -> dict[str, Any]:
        """Measure perplexity, and the divergence from the first variant."""
        comparison = self.comparison
        is_base = not comparison.measured
        self._check_window(comparison.spec.window_tokens)
        scored: list[ScoredWindow] = []
        divergence = None if is_base else Divergence()
        scorer = Scorer(self.engine)
        spec = comparison.spec
        tokens = scorer.tokens(comparison.text)
        for number, window in enumerate(windows(tokens, spec.window_tokens, spec.most_windows)):
            comparison.start_step(self.variant, f"text, window {number + 1}")
            rows = self.folder / (f"base-{number}" if is_base else "other")
            rows.unlink(missing_ok=True)
            scored.append(scorer.score(window, len(window) // 2, rows))
            if divergence is not None and not self._add_window(divergence, number, scored[-1]):
                divergence = None
        if is_base:
            comparison.base_windows.extend(scored)
        figures: dict[str, Any] = {"perplexity": perplexity(scored)}
        if divergence is not None and comparison.base_windows:
            figures["divergence"] = divergence.figures()
        return figures

    def _check_window(self, window_tokens: int) -> None:
        """Raise UsageError if a window and one more token exceed the context."""
        context_tokens = self.engine.info().context_tokens
        if context_tokens and window_tokens >= context_tokens:
            raise UsageError(
                f"--window {window_tokens:,} is too long: the context of {self.variant.name} holds "
                f"{context_tokens:,} tokens, and one more must follow",
                hint=f"use --window {context_tokens - 1:,} at most, or a longer context (--ctx)",
            )

    def _add_window(self, divergence: Divergence, number: int, window: ScoredWindow) -> bool:
        """Add a window to the divergence. Return False if the models cannot be compared."""
        base_windows = self.comparison.base_windows
        if number >= len(base_windows) or len(window.logprobs) != len(
            base_windows[number].logprobs
        ):
            self.left_out.append("KL: the models split the text into different tokens")
            return False
        try:
            divergence.add(base_windows[number], window)
        except UsageError as problem:
            self.left_out.append(f"KL: {problem.message}")
            return False
        return True

    def _tasks(
        self, name: str, numbers: Iterable[int], outcome: Callable[[Engine, int], TaskOutcome]
    ) -> tuple[TaskOutcome, ...]:
        """Run tasks. Skip all of them if the model cannot take one."""
        outcomes = []
        for number in numbers:
            self.comparison.start_step(self.variant, name)
            try:
                outcomes.append(outcome(self.engine, number))
            except LocalchatError as problem:
                is_refusal = isinstance(problem, UsageError)
                if not is_refusal and problem.code not in ("template", "context_exceeded"):
                    raise
                self.left_out.append(f"{name}: {problem.message}")
                return ()
        return tuple(outcomes)

    def _needles(self, info: EngineInfo) -> tuple[TaskOutcome, ...]:
        spec = self.comparison.spec
        outcomes: list[TaskOutcome] = []
        tokens_per_word = self._tokens_per_word()
        for length in spec.needle_lengths:
            name = f"needles at {length:,} tokens"
            if info.context_tokens and length > info.context_tokens:
                self.left_out.append(f"{name}: the context holds {info.context_tokens:,}")
                continue
            hay = needle_text(length, spec.needle_depths, tokens_per_word)
            outcome = partial(tasks.needle_outcome, hay=hay, length=length)
            outcomes += self._tasks(name, range(spec.needle_depths), outcome)
        return tuple(outcomes)

    def _tokens_per_word(self) -> float:
        try:
            sample = prose(_SAMPLE_WORDS, "scale")
            return len(self.engine.tokenize(sample)) / _SAMPLE_WORDS
        except LocalchatError:  # a backend without a tokenizer
            return TokenScale().tokens_per_word
