"""A comparison of variants: opens one after the other, measures it, and compares it with the first."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.remote.client import RemoteClient
from localchat.errors import LocalchatError, NetworkError, UsageError
from localchat.measure import tasks
from localchat.measure.perplexity import (
    Divergence,
    EngineScorer,
    RemoteScorer,
    ScoredWindow,
    Scorer,
    perplexity,
    windows,
)
from localchat.measure.quality_record import QualitySpec, TaskOutcome, VariantQuality
from localchat.measure.sweep import BenchVariant

TESTS: Final = ("text", "greedy", "json", "tools", "needles", "questions")
_SAMPLE_WORDS: Final = 400


class QualityTarget(NamedTuple):
    """An opened variant."""

    engine: Engine
    client: RemoteClient | None = None
    """Of a server; None: an engine of this machine."""


class QualityProgress(NamedTuple):
    """How far a comparison is."""

    variant: str
    what: str
    done: int
    total: int


Open = Callable[[BenchVariant], AbstractContextManager[QualityTarget]]


@dataclass(slots=True)
class Comparison:
    """Measures the variants of a spec in their order."""

    spec: QualitySpec
    text: str
    questions: tuple[tasks.ExamQuestion, ...]
    open: Open
    progress: Callable[[QualityProgress], None]
    bos: bool = True
    """Windows begin with BOS where texts of the model do. Servers tell no BOS, so that with one none does."""
    measured: list[VariantQuality] = field(default_factory=list)
    _base: list[ScoredWindow] = field(default_factory=list)
    _done: int = 0

    def run(self) -> None:
        """Measure all; what is complete stands in `measured`, also after an error. Raises LocalchatError."""
        with tempfile.TemporaryDirectory(prefix="localchat-quality-") as folder:
            for variant in self.spec.variants:
                self._show(variant, "loading")
                with self.open(variant) as target:
                    self.measured.append(_VariantRun(self, variant, target, Path(folder)).measure())

    @property
    def _steps(self) -> int:
        """Steps of one variant, about."""
        spec = self.spec
        needles = len(spec.needle_lengths) * spec.needle_depths
        counts = {
            "text": spec.most_windows,
            "greedy": len(tasks.GREEDY_PROMPTS),
            "json": spec.tasks,
            "tools": spec.tasks,
            "needles": needles,
            "questions": len(self.questions),
        }
        return sum(counts[test] for test in spec.tests)

    def step(self, variant: BenchVariant, what: str) -> None:
        """Report the beginning of a step."""
        self._show(variant, what)
        self._done += 1

    def _show(self, variant: BenchVariant, what: str) -> None:
        total = max(self._steps * len(self.spec.variants), self._done, 1)
        self.progress(QualityProgress(variant.name, what, self._done, total))

    @property
    def base_windows(self) -> list[ScoredWindow]:
        """Scored windows of the first variant."""
        return self._base


@dataclass(slots=True)
class _VariantRun:
    """The measurement of one variant."""

    comparison: Comparison
    variant: BenchVariant
    target: QualityTarget
    folder: Path
    left_out: list[str] = field(default_factory=list)

    def measure(self) -> VariantQuality:
        spec = self.comparison.spec
        engine = self.target.engine
        found: dict[str, Any] = {}
        if "text" in spec.tests:
            found |= self._text()
        if "greedy" in spec.tests:
            found["greedy"] = self._greedy()
        if "json" in spec.tests:
            found["json"] = self._tasks("JSON", range(spec.tasks), tasks.json_outcome)
        if "tools" in spec.tests:
            found["tools"] = self._tasks("tool calls", range(spec.tasks), tasks.tool_outcome)
        info = engine.info()
        if "needles" in spec.tests:
            found["needles"] = self._needles(info)
        if "questions" in spec.tests:
            numbered = self.comparison.questions

            def outcome(engine: Engine, number: int) -> TaskOutcome:
                return tasks.question_outcome(engine, number, numbered[number])

            found["questions"] = self._tasks("questions", range(len(numbered)), outcome)
        return VariantQuality(
            variant=self.variant,
            model=info.model,
            backend=info.backend,
            quantization=info.quantization,
            kv_type=info.kv_type,
            file_bytes=info.file_bytes,
            context_tokens=info.context_tokens,
            left_out=tuple(self.left_out),
            **found,
        )

    # ------------------------------------------------------------------------ the text

    def _text(self) -> dict[str, Any]:
        """Perplexity, and divergence from the first variant."""
        comparison = self.comparison
        is_base = not comparison.measured
        window = comparison.spec.window_tokens
        room = self.target.engine.info().context_tokens
        if room and window >= room:
            raise UsageError(
                f"--window {window:,}: the context of {self.variant.name} holds {room:,} tokens, and one "
                "must follow",
                hint=f"take --window {room - 1:,} at most, or a longer context (--ctx)",
            )
        scored: list[ScoredWindow] = []
        divergence: Divergence | None = None if is_base else Divergence()
        try:
            for number, window in enumerate(self._windows()):
                comparison.step(self.variant, f"text, window {number + 1}")
                rows = self.folder / (f"base-{number}" if is_base else "other")
                rows.unlink(missing_ok=True)
                one = self._scorer().score(window, len(window) // 2, rows)
                scored.append(one)
                if divergence is not None:
                    divergence = self._compared(divergence, number, one)
        except (UsageError, NetworkError) as problem:
            if not scored or isinstance(problem, NetworkError):
                if self.target.client is None:
                    raise
                self.left_out.append(f"perplexity and KL: {problem.message}")
                return {}
            raise
        if is_base:
            comparison.base_windows.extend(scored)
        found: dict[str, Any] = {"perplexity": perplexity(scored)}
        if divergence is not None and comparison.base_windows:
            found["divergence"] = divergence.figures()
        return found

    def _compared(
        self, divergence: Divergence, number: int, one: ScoredWindow
    ) -> Divergence | None:
        """Add a window to the divergence; None where the models cannot be compared token by token."""
        base = self.comparison.base_windows
        if number >= len(base) or len(one.logprobs) != len(base[number].logprobs):
            self.left_out.append("KL: the models cut the text into different tokens")
            return None
        try:
            divergence.add(base[number], one)
        except UsageError as problem:
            self.left_out.append(f"KL: {problem.message}")
            return None
        return divergence

    def _windows(self) -> Iterator[Any]:
        spec = self.comparison.spec
        tokens = self._scorer().tokens(self.comparison.text)
        return windows(tokens, spec.window_tokens, spec.most_windows)

    def _scorer(self) -> Scorer:
        engine, client = self.target
        if client is None:
            return EngineScorer(engine, bos=self.comparison.bos)
        return RemoteScorer(engine, client, engine.info().model)

    # ------------------------------------------------------------------------ tasks

    def _greedy(self) -> tuple[Any, ...]:
        first = self.comparison.measured[0].greedy if self.comparison.measured else ()
        found = []
        for number, prompt in enumerate(tasks.GREEDY_PROMPTS):
            self.comparison.step(self.variant, "greedy texts")
            base = first[number] if number < len(first) else None
            try:
                found.append(tasks.greedy_text(self.target.engine, prompt, base))
            except UsageError as problem:
                self.left_out.append(f"greedy texts: {problem.message}")
                return ()
        return tuple(found)

    def _tasks(
        self, what: str, numbers: Iterable[int], outcome: Callable[[Engine, int], TaskOutcome]
    ) -> tuple[TaskOutcome, ...]:
        found = []
        for number in numbers:
            self.comparison.step(self.variant, what)
            try:
                found.append(outcome(self.target.engine, number))
            except UsageError as problem:
                self.left_out.append(f"{what}: {problem.message}")
                return ()
            except LocalchatError as problem:
                if problem.code not in ("template", "context_exceeded"):
                    raise
                self.left_out.append(f"{what}: {problem.message}")
                return ()
        return tuple(found)

    def _needles(self, info: EngineInfo) -> tuple[TaskOutcome, ...]:
        spec = self.comparison.spec
        found: list[TaskOutcome] = []
        per_word = self._tokens_per_word()
        for length in spec.needle_lengths:
            if info.context_tokens and length > info.context_tokens:
                self.left_out.append(
                    f"needles at {length:,} tokens: the context holds {info.context_tokens:,}"
                )
                continue
            text = tasks.needle_text(length, spec.needle_depths, per_word)

            def outcome(
                engine: Engine, at: int, text: tasks.NeedleText = text, length: int = length
            ) -> TaskOutcome:
                return tasks.needle_outcome(engine, text, at, length)

            found += self._tasks(
                f"needles at {length:,} tokens", range(spec.needle_depths), outcome
            )
        return tuple(found)

    def _tokens_per_word(self) -> float:
        from localchat.measure.workload import TokenScale, prose

        try:
            sample = prose(_SAMPLE_WORDS, "scale")
            return len(self.target.engine.tokenize(sample)) / _SAMPLE_WORDS
        except LocalchatError:  # a server without such a route
            return TokenScale().tokens_per_word
