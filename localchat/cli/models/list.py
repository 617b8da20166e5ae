"""Command `localchat list`: lists the models on this machine and their origin."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.sanitize import sanitize_line
from localchat.units import size

if TYPE_CHECKING:
    from localchat.models.hub.updates import Update
    from localchat.models.index import Model
    from localchat.models.info.inspect import Inspection

_HEAD = ("NAME", "SIZE", "QUANT", "CONTEXT", "ORIGIN")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, as_json: bool) -> None:
    """List the models on this machine.

    Pulled and imported ones, files put into the models folder, and those of Ollama, LM Studio, the Hugging
    Face cache and llama.cpp, which are used in place.
    """
    from localchat.cli.resolve import follow_library_setting
    from localchat.models.hub.updates import KnownUpdates
    from localchat.models.index import read_index

    follow_library_setting(app)
    paths = find_paths(app.environ)
    index = read_index(paths, app.environ)
    rows = list(_inspected(index.models))
    pulled = [one.installed for one in index.models if one.installed is not None]
    newer = {one.name: one for one in KnownUpdates(paths.state_dir).of(pulled)}
    for notice in index.notices:
        tell(f"localchat: {notice}")
    if as_json:
        print_json(
            app.environ,
            [{**_record(model, seen), "newer_on_hub": model.name in newer} for model, seen in rows],
        )
    else:
        print_lines(app.environ, (*_lines(rows), *_newer_lines(newer.values())))


def _inspected(models: "Iterable[Model]") -> "Iterator[tuple[Model, Inspection]]":
    """Inspect each file once, even if several names stand for it."""
    from localchat.models.info.inspect import inspect

    known: dict[object, Inspection] = {}
    for model in models:
        key = model.path.resolve() if model.path is not None else model.name
        if key not in known:
            known[key] = inspect(model)
        yield model, known[key]


def _lines(rows: "list[tuple[Model, Inspection]]") -> Iterator[str]:
    yield from table(_HEAD, (_cells(model, seen) for model, seen in rows), right=(1, 3))
    troubled = [(model, seen.trouble) for model, seen in rows if seen.trouble]
    if troubled:
        yield ""
        yield "These cannot be run:"
    for model, trouble in troubled:
        yield f"  {sanitize_line(model.name)}: {sanitize_line(trouble)}"


def _newer_lines(updates: "Iterable[Update]") -> Iterator[str]:
    for number, one in enumerate(updates):
        if not number:
            yield ""
            yield "Newer on the hub, by the last check:"
        name = sanitize_line(one.name)
        yield f"  {name}: {one.checked_at[:10]}; localchat pull {name} fetches it"


def _cells(model: "Model", seen: "Inspection") -> tuple[str, ...]:
    facts = seen.facts
    return (
        model.name,
        size(model.size_bytes) if model.files else "-",
        _quantization(model, seen) or "-",
        f"{facts.context_tokens:,}" if facts else "-",
        f"{model.origin}{' (cannot be run)' if seen.trouble else ''}",
    )


def _quantization(model: "Model", seen: "Inspection") -> str:
    if model.installed is not None and model.installed.manifest.quantization:
        return model.installed.manifest.quantization
    return seen.facts.quantization if seen.facts else ""


def _record(model: "Model", seen: "Inspection") -> dict[str, Any]:
    facts = seen.facts
    return {
        "name": model.name,
        "kind": model.kind,
        "origin": model.origin,
        "path": str(model.path) if model.path is not None else None,
        "size_bytes": model.size_bytes,
        "architecture": facts.architecture if facts else None,
        "parameters": facts.parameters if facts else None,
        "quantization": _quantization(model, seen) or None,
        "context_tokens": facts.context_tokens if facts else None,
        "alias_of": model.stands_for or None,
        "usable": not seen.trouble,
        "reason": seen.trouble or None,
    }
