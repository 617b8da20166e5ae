"""A pool over scripted engines and a made-up machine: models are named, each takes the memory that it says."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from localchat.engine.options import EngineOptions
from localchat.errors import ModelMissing
from localchat.fit.load_options import LoadOptions
from localchat.pool.admission import AdmissionResult
from localchat.pool.entry import ModelSpec, PoolEntry
from tests.support.scripted_engine import ScriptedEngine


@dataclass(slots=True)
class FakeMachine:
    """`sizes`: bytes by model; `opened`: what was opened, in order; `cramped`: models whose context suffers
    beside others."""

    sizes: dict[str, int]
    total_bytes: int = 100
    cramped: frozenset[str] = frozenset()
    max_slots: int = 16
    opened: list[str] = field(default_factory=list)
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    before_open: Callable[[], None] = lambda: None

    def resolve(self, word: str) -> ModelSpec:
        name = {"alias": "a"}.get(word, word)
        if name not in self.sizes:
            raise ModelMissing(f"no model {word}")
        return ModelSpec(
            name, EngineOptions(Path("/models") / name, load=LoadOptions(max_slots=self.max_slots))
        )

    def open(self, options: EngineOptions, say: Callable[[str], None]) -> ScriptedEngine:
        self.before_open()
        name = options.model.name
        self.opened.append(name)
        self.engines[name] = ScriptedEngine(model=name)
        return self.engines[name]

    def check_memory(self, options: EngineOptions, loaded: Iterable[PoolEntry]) -> AdmissionResult:
        others = list(loaded)
        free = self.total_bytes - sum(self.sizes[one.spec.name] for one in others)
        needed = self.sizes[options.model.name]
        cramped = options.model.name in self.cramped and bool(others)
        return AdmissionResult(needed <= free, cramped, needed, free)

    def alive(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.alive]
