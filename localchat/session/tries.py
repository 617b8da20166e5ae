"""Several tries at the next answer of a conversation: parse the command, and show what was chosen from."""

from typing import TYPE_CHECKING, Final

from localchat.chat.conversation import Node
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest
from localchat.errors import UsageError
from localchat.session.blocks import TriesBlock

# Imported by the functions that need it, so that the first frame of the screen does not wait for it.
if TYPE_CHECKING:
    from localchat.tries.best_answer import BestAnswer
    from localchat.tries.judge import Review
    from localchat.tries.spec import TriesSpec

_USAGE: Final = "vote N [KIND], best N [judge], or critique"


def parse_tries(text: str) -> "TriesSpec":
    """Parse the argument of /tries. Raise UsageError."""
    from localchat.tries import MAX_TRIES
    from localchat.tries.spec import TriesSpec, vote_extractor

    match text.split(maxsplit=2):
        case ["critique"]:
            return TriesSpec(critique=True)
        case ["vote" | "best" as method, number, *options] if number.isdecimal():
            count = int(number)
        case _:
            raise UsageError(f"/tries {text}: use {_USAGE}")
    if not 2 <= count <= MAX_TRIES:
        raise UsageError(f"/tries {method} {count}: use 2 to {MAX_TRIES} tries")
    if method == "vote":
        kind = next(iter(options), None)
        return TriesSpec(count, "vote", vote_extractor(kind, None))
    if options not in ([], ["judge"]):
        raise UsageError(f"/tries {text}: use {_USAGE}")
    return TriesSpec(count, "best_of", judge=bool(options))


def describe(spec: "TriesSpec") -> str:
    """Return a sentence that confirms the tries to the user."""
    if spec.critique:
        return "the model reviews its next answer, and keeps a correction if that is better"
    if spec.judge:
        kept = "the one that the model picks"
    elif spec.method == "vote":
        kept = "the one that most agree on"
    else:
        kept = "the most probable one"
    return f"the next message is tried {spec.count} times; {kept} is kept"


class NextTries:
    """The tries that the user requested for the next answer."""

    def __init__(self) -> None:
        self.next: TriesSpec | None = None

    def start(self, engine: Engine, request: GenerateRequest) -> "BestAnswer | None":
        """Start a request with these tries, and forget them. None without any. Raise UsageError."""
        spec = self.next
        if spec is None:
            return None
        from localchat.tries.best_answer import best_answer
        from localchat.tries.spec import refuse_guide

        if spec.needs_judge:
            refuse_guide(engine.info().model, "/tries")
        self.next = None
        return best_answer(engine, request, spec)


def tries_card(best: "BestAnswer", node: Node) -> TriesBlock | None:
    """Return the card with the tries that were not chosen. None if they did not end."""
    report = best.report
    if report is None:
        return None
    if best.review is not None:
        texts = _critique_texts(best.review)
    else:
        texts = _try_texts(best)
    body = "\n\n".join(f"{title}:\n{text.strip()}" for title, text in texts.items())
    return TriesBlock(f"{node.id}/tries", report.sentence(), body)


def _try_texts(best: "BestAnswer") -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, text in sorted(best.tries.texts.items()):
        title = f"Try {number + 1}"
        if number == best.chosen:
            title += ", kept"
        if number not in best.tries.vote.answers:
            title += ", cancelled"
        texts[title] = text
    return texts


def _critique_texts(review: "Review") -> dict[str, str]:
    texts: dict[str, str] = {}
    if review.faults:
        texts["Faults"] = "\n".join(f"- {fault}" for fault in review.faults)
    if review.replaced:
        texts["First answer"] = review.first
    elif review.correction is not None:
        texts["Second answer"] = review.correction.text
    return texts
