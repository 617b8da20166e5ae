"""Several tries at one answer: read the flags, and start the request."""

from typing import TYPE_CHECKING

import click
import msgspec

from localchat.cli.options import given_flags
from localchat.cli.resolve import Setup
from localchat.engine.request import GenerateRequest, Grammar
from localchat.errors import UsageError
from localchat.tries.spec import TriesSpec, refuse_guide, vote_extractor

if TYPE_CHECKING:
    from localchat.engine.interface import Engine
    from localchat.tries.best_answer import BestAnswer


def requested_tries(ctx: click.Context, grammar: Grammar | None) -> TriesSpec | None:
    """Return the tries that the flags request, or None. Raise UsageError."""
    params = ctx.params
    names = [name for name in ("best_of", "vote", "critique") if params.get(name)]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)} cannot be combined")
    if params.get("judge") and not params.get("best_of"):
        raise UsageError("--judge picks among the answers of --best-of")
    if params.get("vote_by") and not params.get("vote"):
        raise UsageError("--vote-by says what --vote counts")
    if not flags:
        return None
    (flag,) = flags
    if "n" in given_flags(ctx):
        raise UsageError(f"{flag} prints one answer, and --n asks for several")
    if params["interactive"]:
        raise UsageError(f"-i is a conversation; {flag} is for one answer")
    for name in ("critique", "judge"):
        if params["raw_prompt"] and params.get(name):
            raise UsageError(f"--{name} asks in a conversation, and --raw-prompt has none")
    match names:
        case ["vote"]:
            extractor = vote_extractor(params.get("vote_by"), grammar)
            return TriesSpec(params["vote"], "vote", extractor)
        case ["best_of"]:
            return TriesSpec(params["best_of"], "best_of", judge=bool(params.get("judge")))
    return TriesSpec(critique=True)


def with_slots(setup: Setup, spec: TriesSpec | None) -> Setup:
    """Return the setup with a slot for each try. Raise UsageError if these tries are impossible."""
    if spec is None:
        return setup
    if spec.needs_judge:
        refuse_guide(setup.model.name, "--critique" if spec.critique else "--judge")
    if spec.method is None:
        return setup
    if setup.settings.temperature == 0:
        raise UsageError(
            "with temperature 0 every try gives the same answer", hint="--temperature 0.7"
        )
    # The number of choices is also the number of slots, and the tries decode as one batch.
    settings = msgspec.structs.replace(setup.settings, n=spec.count)
    return msgspec.structs.replace(setup, settings=settings)


def start_tries(engine: "Engine", request: GenerateRequest, spec: TriesSpec) -> "BestAnswer":
    """Start a request that streams all of its tries."""
    from localchat.tries.best_answer import best_answer  # most prompts have one try

    return best_answer(engine, request, spec, live=True)
