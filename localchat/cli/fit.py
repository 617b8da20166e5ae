"""`localchat fit MODEL`: will it run here, and how: by the planner that decides at the load."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from localchat.fit.machine import Machine
    from localchat.fit.plan import LoadWish, MemoryPlan
    from localchat.settings import Settings

_LEAST_SLOTS = 2
"""Sequences that a chat loads with."""


class _Verdict(NamedTuple):
    """memory_bytes, others_bytes: of the memory that bounds the plan, all of it and what is taken.
    tokens_per_s: an estimate, None where there is none."""

    plan: "MemoryPlan"
    memory_bytes: int
    others_bytes: int
    tokens_per_s: float | None


@click.command("fit")
@click.argument("word", metavar="MODEL")
@click.option("--ctx", "context_length", metavar="TOKENS", help="With this context.")
@click.option("--kv-type", "kv_cache_type", metavar="TYPE", help="KV cache as f16, q8_0 or q4_0.")
@click.option("--gpu-layers", "gpu_layers", metavar="N", help="Layers on the GPU.")
@click.option("--parallel", type=click.IntRange(1, 255), metavar="N", help="Requests at once; 2.")
@click.option("--backend", "backend", metavar="NAME", help="What would run the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, word: str, parallel: int | None, as_json: bool, **_: object
) -> int:
    """Say whether a model fits into memory, and what would help.

    Reads the header of the file and the memory that is free now; no weights are loaded. The speed is an
    estimate from a short probe. Ends with 0 where the model fits and with 4 where it does not.
    """
    from localchat.backends import backend_for
    from localchat.cli.page import print_json, print_lines
    from localchat.cli.setup import prepare
    from localchat.errors import ExitCode, ModelInvalid
    from localchat.fit.header import read_header
    from localchat.fit.machine import read_machine

    setup = prepare(ctx, word)
    header = read_header(setup.model.path)
    backend = backend_for(setup.model.path, setup.settings.backend)
    if objection := backend.objection(header):
        raise ModelInvalid(f"{setup.model.name} cannot be run: {objection}")
    slots = parallel or max(_LEAST_SLOTS, setup.settings.n)
    plan = backend.plan(header, _wish(setup.settings, slots))
    rate = backend.expected_rate(header, plan, setup.settings.threads) if plan.fits else None
    verdict = _Verdict(plan, *_memory(plan, read_machine()), tokens_per_s=rate)
    environ = setup.door.environ
    if as_json:
        told = {"model": setup.model.name, "path": str(setup.model.path), "parallel": slots}
        print_json(environ, told | _record(verdict))
    else:
        print_lines(environ, _lines(setup.model.name, verdict))
    return ExitCode.OK if plan.fits else ExitCode.DOES_NOT_FIT


def _wish(settings: "Settings", slots: int) -> "LoadWish":
    from localchat.fit.plan import LoadWish

    cache = settings.cache_ram_mib
    return LoadWish(
        context_tokens=settings.context_length,
        kv_type=settings.kv_cache_type,
        gpu_layers=settings.gpu_layers,
        max_slots=slots,
        cache_ram_bytes=None if cache is None else cache * 2**20,
        threads=settings.threads,
    )


def _memory(plan: "MemoryPlan", machine: "Machine") -> tuple[int, int]:
    """All memory that the plan draws on, and what of it is taken: RAM, with the cards where they are used."""
    total = machine.ram_total_bytes
    free = machine.ram_free_bytes
    if plan.gpu_bytes:
        total += sum(gpu.total_bytes for gpu in machine.gpus)
        free += machine.gpu_free_bytes
    return total, max(total - free, 0)


def _lines(name: str, verdict: _Verdict) -> Iterator[str]:
    from localchat.fit.words import bar, rate
    from localchat.fit.words import verdict as sentences
    from localchat.inert import inert_line

    first, _, *rest = sentences(verdict.plan)
    yield f"{inert_line(name)}: {first[0].lower()}{first[1:]}"
    yield from bar(verdict.plan, verdict.memory_bytes, verdict.others_bytes)
    yield f"Backend {verdict.plan.backend}, KV cache {verdict.plan.kv_type}."
    if verdict.tokens_per_s is not None:
        yield f"About {rate(verdict.tokens_per_s)}, by a probe of this build, while nothing else computes."
    yield from rest


def _record(verdict: _Verdict) -> dict[str, Any]:
    plan = verdict.plan
    return {
        "backend": plan.backend,
        "fits": plan.fits,
        "context_tokens": plan.context_tokens,
        "max_context_tokens": plan.max_context_tokens,
        "kv_type": plan.kv_type,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes": plan.kv_bytes,
        "compute_bytes": plan.compute_bytes,
        "overhead_bytes": plan.overhead_bytes,
        "total_bytes": plan.total_bytes,
        "free_bytes": plan.free_bytes,
        "memory_bytes": verdict.memory_bytes,
        "others_bytes": verdict.others_bytes,
        "gpu_layers": plan.gpu_layers,
        "layers": plan.layers,
        "gpu_bytes": plan.gpu_bytes,
        "gpu_free_bytes": plan.gpu_free_bytes,
        "expected_tokens_per_s": verdict.tokens_per_s,
        "advice": plan.advice,
        "notes": plan.notes,
    }
