"""Exact mode: steps in which the logits of a row do not depend on what else is computed.

Logits of a row depend on the number of rows in its step; a runner states the classes of counts within which
they are bit-equal (`Capabilities.equal_rows`). A request in exact mode writes in steps of one class, padded
where a step would be too small, so that drafts, which make steps wider, change no token. No class is wide
enough for prompts: they are computed alone, cut at multiples of EXACT_CHUNK_TOKENS.
"""

from localchat.backend_api.interface import Capabilities, RowClass

EXACT_CHUNK_TOKENS = 64


def writing_class(capabilities: Capabilities) -> RowClass | None:
    """The narrowest class with room for drafts, else the first. None: the runner states no difference."""
    classes = capabilities.equal_rows
    roomy = [one for one in classes if one.high > one.low]
    return roomy[0] if roomy else next(iter(classes), None)
