"""The probe from outside: asks for what is not known yet, in a process of its own, and remembers it."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from localchat.fit.measures import Measures
from localchat_llamacpp.rebuild import build_key

_PATIENCE_S: Final = 30.0
_SPIN: Final = "2000"
"""See the child's environment: threads that spin longer starve each other on a busy machine."""


class Layer(msgspec.Struct, frozen=True):
    """What decides what a layer takes beside its products."""

    heads: int
    kv_heads: int
    head_width: int
    kv_type: str
    flash: bool


class Question(msgspec.Struct, frozen=True):
    """codes: ggml's type numbers. layers: each is measured."""

    threads: int
    codes: tuple[int, ...]
    layers: tuple[Layer, ...]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of `bytes_per_s` of a code, `layer_s` of a layer. settled: enough steps agreed; a number that is not
    was taken beside other programs."""

    settled: bool
    code: int = -1
    bytes_per_s: float = 0.0
    layer: Layer | None = None
    layer_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of this build and machine with so many threads: bytes a second by ggml's type number, seconds of a
    layer beside its products, seconds of a step beside its layers."""

    bytes_per_s: dict[int, float] = field(default_factory=dict)
    layer_s: dict[Layer, float] = field(default_factory=dict)
    step_s: dict[Layer, float] = field(default_factory=dict)


def costs(threads: int, codes: Iterable[int], layers: Iterable[Layer], measures: Measures) -> Costs:
    """What is known of these and what a probe tells of the rest, about a second. Where the probe fails, which
    a native crash may make it do, something is missing."""
    found = Costs()
    at = f"{build_key()} {threads} threads"
    known = measures.known()
    wanted = Question(threads, tuple(sorted(set(codes))), tuple(dict.fromkeys(layers)))
    left = Question(
        threads,
        tuple(code for code in wanted.codes if not _take(found, known, at, code)),
        tuple(layer for layer in wanted.layers if not _take(found, known, at, layer)),
    )
    if not left.codes and not left.layers:
        return found
    fresh: dict[str, float] = {}
    for one in _ask(left):
        told = dict(_named(at, one))
        if one.settled:
            fresh |= told
        _take(found, told, at, one.layer or one.code)
    measures.keep(fresh)
    return found


def _take(found: Costs, numbers: dict[str, float], at: str, what: int | Layer) -> bool:
    """Enter what the numbers say of a code or a layer; whether they say it."""
    if isinstance(what, int):
        rate = numbers.get(_name(at, what))
        if rate is not None:
            found.bytes_per_s[what] = rate
        return rate is not None
    layer_s, step_s = (numbers.get(_name(at, what, part)) for part in ("layer", "step"))
    if layer_s is None or step_s is None:
        return False
    found.layer_s[what], found.step_s[what] = layer_s, step_s
    return True


def _named(at: str, one: Finding) -> Iterator[tuple[str, float]]:
    if one.layer is None:
        yield _name(at, one.code), one.bytes_per_s
        return
    yield _name(at, one.layer, "layer"), one.layer_s
    yield _name(at, one.layer, "step"), one.step_s


def _name(at: str, what: int | Layer, part: str = "") -> str:
    if isinstance(what, int):
        return f"{at}, format {what}, bytes a second"
    flash = ", flash" if what.flash else ""
    heads = f"{what.heads}/{what.kv_heads} heads of {what.head_width}"
    return f"{at}, {heads}, {what.kv_type}{flash}, seconds of a {part}"


def _ask(question: Question) -> Iterator[Finding]:
    command = [sys.executable, "-m", "localchat_llamacpp.probe"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GOMP_SPINCOUNT": _SPIN,
        "GGML_NO_BACKTRACE": "1",
    }
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(question),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
            env=environment,
        )
        said = done.stdout
    except subprocess.TimeoutExpired as slow:
        said = slow.stdout or b""
    except OSError:
        return
    for line in said.splitlines():
        try:
            yield msgspec.json.decode(line, type=Finding)
        except msgspec.DecodeError:
            return  # it ended in the middle of a line
