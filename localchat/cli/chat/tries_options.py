"""Reads the flags of more tries at one answer: --best-of, --vote and --critique."""

from typing import TYPE_CHECKING

import click
import msgspec

from localchat.cli.options import given_flags
from localchat.cli.resolve import Setup
from localchat.engine.request import Grammar
from localchat.errors import UsageError

# The tries are imported when there are any: most prompts and the screen need none.
if TYPE_CHECKING:
    from localchat.tries.collection import Method, Tries
    from localchat.tries.extractor import Extractor


class TriesOptions(msgspec.Struct, frozen=True):
    """How often a prompt is tried, and how one answer is made of that."""

    count: int = 1
    method: "Method | None" = None
    extractor: "Extractor | None" = None
    judge: bool = False
    critique: bool = False

    def applied(self, setup: Setup) -> Setup:
        """The setup with as many choices as there are tries. Raises UsageError."""
        if self.judge or self.critique:
            from localchat.tries.critique import refuse_guide

            refuse_guide(setup.model.name, "--critique" if self.critique else "--judge")
        if self.method is None:
            return setup
        if setup.settings.temperature == 0:
            raise UsageError(
                "with temperature 0 every try gives the same answer", hint="--temperature 0.7"
            )
        return msgspec.structs.replace(
            setup, settings=msgspec.structs.replace(setup.settings, n=self.count)
        )

    def begin(self) -> "Tries | None":
        """The tries of a request that is sent now; None if there is one answer."""
        if self.method is None:
            return None
        from localchat.tries.collection import Tries
        from localchat.tries.extractor import last_number

        return Tries(self.count, self.method, self.extractor or last_number)

    @property
    def logprobs(self) -> int | None:
        """Alternatives to ask for with each token: none, or the log probability of the token alone."""
        if self.method == "best_of" and not self.judge:
            return 0
        return None


def requested_tries(ctx: click.Context, grammar: Grammar | None) -> TriesOptions:
    """The tries that the flags ask for. Raises UsageError."""
    given = {name: ctx.params.get(name) for name in ("best_of", "vote", "critique")}
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: only one of them")
    if named and "n" in given_flags(ctx):
        raise UsageError(f"{named[0]} prints one answer, and --n asks for several")
    if named and ctx.params["interactive"]:
        raise UsageError(f"-i is a conversation; {named[0]} is for one answer")
    if ctx.params.get("judge") and not given["best_of"]:
        raise UsageError("--judge picks among the answers of --best-of")
    if ctx.params.get("vote_by") and not given["vote"]:
        raise UsageError("--vote-by says what --vote counts")
    if given["critique"] and ctx.params["raw_prompt"]:
        raise UsageError("--critique asks in a conversation, and --raw-prompt has none")
    if given["vote"]:
        from localchat.tries.spec import counted

        by = counted(ctx.params.get("vote_by"), grammar)
        return TriesOptions(int(given["vote"]), "vote", by)
    if given["best_of"]:
        judge = bool(ctx.params.get("judge"))
        if judge and ctx.params["raw_prompt"]:
            raise UsageError("--judge asks in a conversation, and --raw-prompt has none")
        return TriesOptions(int(given["best_of"]), "best_of", judge=judge)
    return TriesOptions(critique=bool(given["critique"]))
