"""Servers of this user that run already: said before another one starts, because each loads its own models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localchat.config.paths import Paths
    from localchat.pool.entry import LoadedModel


def neighbours(paths: "Paths", own: str) -> "Iterator[str]":
    """A sentence for each server that answers: where it is, what it holds, and what a second one costs. `own`:
    the name of the model that this one will load."""
    import msgspec

    from localchat.cli.attaching import running_servers
    from localchat.pool.entry import ServerState

    found = running_servers(paths)
    for server, told in found:
        models = msgspec.json.decode(told, type=ServerState).models
        yield f"another server runs at {server.url} and holds {_held(models)}"
        twice = next((model for model in models if model.name == own), None)
        if twice is not None:
            yield (
                f"{own} is loaded there and will be loaded here once more{_cost(twice)}: servers share no "
                "memory and no cache"
            )
    if found:
        yield (
            "one server is enough for all clients and several models (the names of `localchat list`); "
            "`localchat stop` ends those that run"
        )


def _held(models: "tuple[LoadedModel, ...]") -> str:
    from localchat.sanitize import sanitize_line

    if not models:
        return "no model now"
    return ", ".join(sanitize_line(model.name) + _size(model) for model in models)


def _size(model: "LoadedModel") -> str:
    from localchat.fit.report import size

    bytes_ = model.process_bytes or model.memory_bytes
    return f" ({size(bytes_)})" if bytes_ else ""


def _cost(model: "LoadedModel") -> str:
    from localchat.fit.report import size

    bytes_ = model.process_bytes or model.memory_bytes
    return f", for about as much memory again ({size(bytes_)})" if bytes_ else ""
