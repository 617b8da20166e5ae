"""Command `localchat list`: list the models on this machine and their origin."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.chat.conversation_options import open_history
from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import Paths, find_paths
from localchat.errors import HistoryUnusable
from localchat.sanitize import sanitize_line
from localchat.units import size

if TYPE_CHECKING:
    from localchat.models.index import Model
    from localchat.models.info.inspect import Inspection

_HEAD = ("NAME", "SIZE", "QUANT", "CONTEXT", "ORIGIN")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, as_json: bool) -> None:
    """List the models on this machine.

    The list has pulled and imported models, files in the models folder, and models of Ollama, LM Studio, the
    Hugging Face cache and llama.cpp, which are used in place. Models that were used by their path come last.
    """
    from localchat.cli.resolve import follow_library_setting
    from localchat.models.index import read_index, used_by_path

    follow_library_setting(app)
    paths = find_paths(app.environ)
    index = read_index(paths, app.environ)
    rows = list(_inspected((*index.models, *used_by_path(_used_names(paths), index.models))))
    for notice in index.notices:
        tell(f"localchat: {notice}")
    if as_json:
        print_json(app.environ, [record(model, inspection) for model, inspection in rows])
    else:
        print_lines(app.environ, _lines(rows))


def _used_names(paths: Paths) -> tuple[str, ...]:
    """Return names of models that were used, the last one first."""
    from localchat.history.used_models import used_models
    from localchat.models.resolve import last_model

    last = tuple(filter(None, [last_model(paths)]))
    try:
        with open_history(paths, to_read=True) as history:
            return (*last, *used_models(history))
    except HistoryUnusable:
        return last


def _inspected(models: "Iterable[Model]") -> "Iterator[tuple[Model, Inspection]]":
    """Yield each model with its inspection. A file with several names is inspected once."""
    from localchat.models.info.inspect import inspect

    inspections: dict[object, Inspection] = {}
    for model in models:
        key = model.path.resolve() if model.path is not None else model.name
        if key not in inspections:
            inspections[key] = inspect(model)
        yield model, inspections[key]


def _lines(rows: "list[tuple[Model, Inspection]]") -> Iterator[str]:
    yield from table(_HEAD, (_cells(model, inspection) for model, inspection in rows), right=(1, 3))
    unusable = [(model, inspection) for model, inspection in rows if inspection.trouble]
    if unusable:
        yield ""
        yield "These models cannot be run:"
    for model, inspection in unusable:
        yield f"  {sanitize_line(model.name)}: {sanitize_line(inspection.trouble)}"


def _cells(model: "Model", inspection: "Inspection") -> tuple[str, ...]:
    facts = inspection.facts
    origin = model.origin
    if inspection.trouble:
        origin += " (cannot be run)"
    return (
        model.name,
        size(model.size_bytes) if model.files else "-",
        _quantization(model, inspection) or "-",
        f"{facts.context_tokens:,}" if facts else "-",
        origin,
    )


def _quantization(model: "Model", inspection: "Inspection") -> str:
    if model.installed is not None and model.installed.manifest.quantization:
        return model.installed.manifest.quantization
    return inspection.facts.quantization if inspection.facts else ""


def record(model: "Model", inspection: "Inspection") -> dict[str, Any]:
    """Return the facts that `list --json` prints, with which `show --json` begins."""
    facts = inspection.facts
    return {
        "name": model.name,
        "kind": model.kind,
        "origin": model.origin,
        "path": str(model.path) if model.path is not None else None,
        "size_bytes": model.size_bytes,
        "architecture": facts.architecture if facts else None,
        "parameters": facts.parameters if facts else None,
        "quantization": _quantization(model, inspection) or None,
        "context_tokens": facts.context_tokens if facts else None,
        "alias_of": model.stands_for or None,
        "usable": not inspection.trouble,
        "reason": inspection.trouble or None,
    }
