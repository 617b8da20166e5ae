"""Command `localchat show`: describe a model and its capabilities."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from localchat.cli.context import AppContext
from localchat.cli.models.list import record
from localchat.cli.options import complete_model
from localchat.cli.output import print_json, print_lines
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError
from localchat.sanitize import sanitize_line
from localchat.units import size, tokens

if TYPE_CHECKING:
    from localchat.config.paths import Paths
    from localchat.models.index import Model
    from localchat.models.info.inspect import Inspection
    from localchat.models.recommended_sampling import RecommendedSampling


@click.command("show")
@click.argument("name", metavar="MODEL", shell_complete=complete_model)
@click.option("--template", is_flag=True, help="Print the chat template and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--offline/--no-offline", hidden=True, expose_value=False)  # accepted as by prompts
@click.pass_obj
def command(app: AppContext, name: str, template: bool, as_json: bool) -> None:
    """Show a model's size, license and capabilities.

    The command reads the header of the file and loads no weights.
    """
    from localchat.cli.resolve import follow_library_setting
    from localchat.models.index import find_model, read_index
    from localchat.models.info.inspect import inspect

    follow_library_setting(app)
    paths = find_paths(app.environ)
    model = find_model(name, read_index(paths, app.environ), paths, app.environ)
    inspection = inspect(model, vocabulary=not template)
    if template:
        print_lines(app.environ, (_template(model, inspection),))
        return
    outlook = _outlook(app, model, paths)
    if as_json:
        print_json(app.environ, _record(model, inspection, outlook))
    else:
        print_lines(app.environ, _lines(model, inspection, outlook))


class _Outlook(NamedTuple):
    """How a model would run on this machine."""

    why: str
    """Sentence about the chosen backend. Empty if no backend can run the model."""
    advice: "RecommendedSampling"
    missing: str = ""
    """Sentence about what is missing to run the model."""
    kv_types: tuple[str, ...] = ()
    """Possible types of the KV cache."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters in the settings of the model."""
    head: str = ""
    """Sentence about the model's prediction head. Empty without one."""


def _outlook(app: AppContext, model: "Model", paths: "Paths") -> _Outlook:
    """Plan the model on this machine with the user's settings. Raises UsageError for invalid settings."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import Inputs, chat_slots, subject_of
    from localchat.models.assess import assess
    from localchat.models.recommended_sampling import NO_RECOMMENDATION, recommended_sampling
    from localchat.models.resolve import ResolvedModel, planned_load

    if model.path is None:
        return _Outlook("", NO_RECOMMENDATION)
    located = ResolvedModel(model.stands_for or model.name, model.name, model.path, "")
    settings = Inputs(app, {}).settings((located.word, located.name)).settings
    try:
        options = planned_load(settings, paths, max_slots=chat_slots(settings))
        subject = subject_of(located, settings)
        report = assess(subject, options, usable_machine(), None, speed=False)
    except LocalchatError:  # the line "trouble" shows the error
        return _Outlook("", recommended_sampling(located, paths))
    why = "" if report.plan.missing else report.why
    advice = recommended_sampling(located, paths)
    adapters = tuple(adapter.label for adapter in options.lora)
    head = next((note for note in report.plan.notes if "prediction head" in note), "")
    return _Outlook(why, advice, report.plan.missing, report.plan.kv_types, adapters, head)


def _template(model: "Model", inspection: "Inspection") -> str:
    if inspection.facts is None:
        raise LocalchatError(f"{model.name} cannot be read: {inspection.trouble}")
    templates = inspection.facts.templates
    if not templates:
        raise LocalchatError(
            f"{model.name} has no chat template",
            hint="it reads conversations as plain text; an instruct version of it has a template",
        )
    return templates.get("default") or next(iter(templates.values()))


def _lines(model: "Model", inspection: "Inspection", outlook: _Outlook) -> Iterator[str]:
    rows = (*_file_rows(model), *_fact_rows(inspection), *_outlook_rows(outlook))
    for name, text in rows:
        if text:
            yield f"{name:<13}{sanitize_line(text)}"
    facts = inspection.facts
    if facts is not None:
        yield from _labelled("can", facts.can)
        yield from _labelled("cannot", facts.cannot)
    yield from _labelled("mind", model.notes)
    if inspection.trouble:
        yield f"{'trouble':<13}It cannot be run: {sanitize_line(inspection.trouble)}."


def _labelled(label: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield one line for each text, with the label before the first."""
    for text in texts:
        yield f"{label:<13}{text}"
        label = ""


def _file_rows(model: "Model") -> Iterator[tuple[str, str]]:
    yield "name", model.name
    yield "origin", model.origin
    if model.path is not None:
        yield "path", str(model.path)
    if len(model.files) > 1:
        yield "size", f"{size(model.size_bytes)} in {len(model.files)} files"
    elif model.files:
        yield "size", size(model.size_bytes)


def _outlook_rows(outlook: _Outlook) -> Iterator[tuple[str, str]]:
    if outlook.advice.sampling:
        values = ", ".join(f"{key} {value:g}" for key, value in outlook.advice.sampling.items())
        yield "sampling", f"{values} ({outlook.advice.entry} in models.toml)"
    yield "LoRA", ", ".join(outlook.adapters)
    if outlook.why:
        yield "runs on", outlook.why
    elif outlook.missing:
        yield "runs on", f"nothing here: {outlook.missing}"
    yield "drafts", outlook.head


def _fact_rows(inspection: "Inspection") -> Iterator[tuple[str, str]]:
    facts = inspection.facts
    if facts is None:
        return
    yield "architecture", f"{facts.architecture}, {facts.layers} layers"
    yield "attention", facts.attention
    yield "parameters", _count(facts.parameters)
    yield "quantization", facts.quantization
    yield "context", tokens(facts.context_tokens)
    yield "vocabulary", tokens(facts.vocab_size)
    kv_sizes = []
    if facts.kv_bytes_per_token:
        kv_sizes.append(f"{size(facts.kv_bytes_per_token)} a token (f16)")
    if facts.state_bytes:
        kv_sizes.append(f"{size(facts.state_bytes)} a conversation")
    yield "KV cache", " and ".join(kv_sizes)
    yield "license", facts.license or "not named in the file"
    if facts.templates:
        names = ", ".join(facts.templates)
        length = sum(map(len, facts.templates.values()))
        yield "template", f"{names} ({length:,} characters; --template prints it)"
    else:
        yield "template", "none"


def _count(parameters: int) -> str:
    """Format a number of parameters, such as 7.6 billion or 494 million."""
    if parameters >= 999_500_000:
        return f"{parameters / 1e9:.1f} billion"
    digits = 0 if parameters >= 10_000_000 else 1
    return f"{parameters / 1e6:.{digits}f} million"


def _record(model: "Model", inspection: "Inspection", outlook: _Outlook) -> dict[str, Any]:
    facts = inspection.facts
    outline = record(model, inspection) | {
        "files": [str(file) for file in model.files],
        "notes": model.notes,
        "why": outlook.why or None,
        "missing": outlook.missing or None,
        "drafts": outlook.head or None,
        "sampling": outlook.advice.sampling,
        "lora": outlook.adapters,
    }
    if facts is None:
        return outline
    return outline | {
        "layers": facts.layers,
        "attention": facts.attention or None,
        "vocab_size": facts.vocab_size,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "kv_types": facts.kv_types or outlook.kv_types,
        "state_bytes": facts.state_bytes,
        "license": facts.license or None,
        "templates": facts.templates,
        "can": facts.can,
        "cannot": facts.cannot,
    }
