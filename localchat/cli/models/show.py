"""Command `localchat show`: describes a model and its abilities."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from localchat.cli.context import AppContext
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
@click.argument("word", metavar="MODEL", shell_complete=complete_model)
@click.option("--template", is_flag=True, help="Print the chat template and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--offline/--no-offline", hidden=True, expose_value=False)  # as prompts have it
@click.pass_obj
def command(app: AppContext, word: str, template: bool, as_json: bool) -> None:
    """Show a model's size, license and capabilities.

    Reads the header of its file; no weights are loaded.
    """
    from localchat.cli.resolve import follow_library_setting
    from localchat.models.index import find_model, read_index
    from localchat.models.info.inspect import inspect
    from localchat.models.recommended_sampling import NO_RECOMMENDATION

    follow_library_setting(app)
    paths = find_paths(app.environ)
    model = find_model(word, read_index(paths, app.environ), paths, app.environ)
    seen = inspect(model, vocabulary=not template)
    here = _Here("", NO_RECOMMENDATION) if template else _here(app, model, paths)
    if template:
        print_lines(app.environ, (_template(model, seen),))
    elif as_json:
        print_json(app.environ, _record(model, seen, here))
    else:
        print_lines(app.environ, _lines(model, seen, here))


class _Here(NamedTuple):
    """How a model would run on this machine."""

    why: str
    """The backend and its reason, one sentence; empty if none can run it."""
    advice: "RecommendedSampling"
    missing: str = ""
    """What is missing to run it, one sentence."""
    kv_types: tuple[str, ...] = ()
    """Types that its KV cache can have."""


def _here(app: AppContext, model: "Model", paths: "Paths") -> _Here:
    """Plan the model on this machine with the user's settings. Raises UsageError for invalid settings."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.resolve import CHAT_SLOTS, Inputs
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.assess import Subject, assess
    from localchat.models.recommended_sampling import NO_RECOMMENDATION, recommended_sampling
    from localchat.models.resolve import ResolvedModel, planned_load

    if model.path is None:
        return _Here("", NO_RECOMMENDATION)
    located = ResolvedModel(model.stands_for or model.name, model.name, model.path, "")
    settings = Inputs(app, {}).settings((located.word, located.name)).settings
    try:
        options = planned_load(settings, paths, max_slots=max(CHAT_SLOTS, settings.n))
        subject = Subject(model.name, read_summary(model.path), model.path, settings.backend)
        found = assess(subject, options, usable_machine(), None, speed=False)
    except LocalchatError:  # printed as the line "trouble"
        return _Here("", recommended_sampling(located, paths))
    why = "" if found.plan.missing else found.why
    advice = recommended_sampling(located, paths)
    return _Here(why, advice, found.plan.missing, found.plan.kv_types)


def _template(model: "Model", seen: "Inspection") -> str:
    if seen.facts is None:
        raise LocalchatError(f"{model.name} cannot be read: {seen.trouble}")
    if not seen.facts.templates:
        raise LocalchatError(
            f"{model.name} brings no chat template",
            hint="a conversation reaches it as plain text; an instruct version of it has one",
        )
    templates = seen.facts.templates
    return templates.get("default") or next(iter(templates.values()))


def _lines(model: "Model", seen: "Inspection", here: _Here) -> Iterator[str]:
    advice = ", ".join(f"{key} {value:g}" for key, value in here.advice.sampling.items())
    record = (
        ("sampling", f"{advice} ({here.advice.entry} in models.toml)" if advice else ""),
        ("runs on", here.why or (f"nothing here: {here.missing}" if here.missing else "")),
    )
    rows = [(name, text) for name, text in (*_where(model), *_what(seen), *record) if text]
    for name, text in rows:
        yield f"{name:<13}{sanitize_line(text)}"
    sentences = (
        ("can", seen.facts.can if seen.facts else ()),
        ("cannot", seen.facts.cannot if seen.facts else ()),
        ("mind", model.notes),
    )
    for name, texts in sentences:
        for number, text in enumerate(texts):
            yield f"{name if number == 0 else '':<13}{text}"
    if seen.trouble:
        yield f"{'trouble':<13}It cannot be run: {sanitize_line(seen.trouble)}."


def _where(model: "Model") -> tuple[tuple[str, str], ...]:
    files = len(model.files)
    return (
        ("name", model.name),
        ("origin", model.origin),
        ("path", str(model.path) if model.path is not None else ""),
        (
            "size",
            f"{size(model.size_bytes)}{f' in {files} files' if files > 1 else ''}" if files else "",
        ),
    )


def _what(seen: "Inspection") -> Iterator[tuple[str, str]]:
    facts = seen.facts
    if facts is None:
        return
    yield "architecture", f"{facts.architecture}, {facts.layers} layers"
    yield "attention", facts.attention
    yield "parameters", _count(facts.parameters)
    yield "quantization", facts.quantization
    yield "context", tokens(facts.context_tokens)
    yield "vocabulary", tokens(facts.vocab_size)
    grows = f"{size(facts.kv_bytes_per_token)} a token (f16)" if facts.kv_bytes_per_token else ""
    fixed = f"{size(facts.state_bytes)} a conversation" if facts.state_bytes else ""
    yield "KV cache", " and ".join(part for part in (grows, fixed) if part)
    yield "licence", facts.licence or "not named in the file"
    names = ", ".join(facts.templates)
    lengths = sum(map(len, facts.templates.values()))
    yield "template", f"{names} ({lengths:,} characters; --template prints it)" if names else "none"


def _count(parameters: int) -> str:
    """7.6 billion, 494 million."""
    if parameters >= 999_500_000:
        return f"{parameters / 1e9:.1f} billion"
    return f"{parameters / 1e6:.{0 if parameters >= 10_000_000 else 1}f} million"


def _record(model: "Model", seen: "Inspection", here: _Here) -> dict[str, Any]:
    facts = seen.facts
    record: dict[str, Any] = {
        "name": model.name,
        "kind": model.kind,
        "origin": model.origin,
        "path": str(model.path) if model.path is not None else None,
        "files": [str(file) for file in model.files],
        "size_bytes": model.size_bytes,
        "alias_of": model.stands_for or None,
        "notes": model.notes,
        "usable": not seen.trouble,
        "reason": seen.trouble or None,
        "why": here.why or None,
        "missing": here.missing or None,
        "sampling": here.advice.sampling,
    }
    if facts is None:
        return record
    return record | {
        "architecture": facts.architecture,
        "layers": facts.layers,
        "attention": facts.attention or None,
        "parameters": facts.parameters,
        "quantization": facts.quantization,
        "context_tokens": facts.context_tokens,
        "vocab_size": facts.vocab_size,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "kv_types": facts.kv_types or here.kv_types,
        "state_bytes": facts.state_bytes,
        "licence": facts.licence or None,
        "templates": facts.templates,
        "can": facts.can,
        "cannot": facts.cannot,
    }
