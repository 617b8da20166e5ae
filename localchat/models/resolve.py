"""Resolves the name of a model to its file: a path, the guide, a loose file, an alias or a pulled name.

Remembers the model of the last run in the state folder. Reads catalogue and manifests only if nothing simpler
matches, because this runs before every first frame and every first token.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localchat.atomic import write_text
from localchat.config.paths import Paths, expand_home
from localchat.config.remotes import Remote
from localchat.config.settings import Settings
from localchat.engine.options import load_options
from localchat.errors import ModelInvalid, ModelMissing, UsageError, reason
from localchat.fit.load_options import MAX_LORA_SCALE, LoadOptions, LoraAdapter
from localchat.sanitize import sanitize_line

if TYPE_CHECKING:
    from localchat.models.aliases import ModelAlias
    from localchat.models.catalog import Catalog
    from localchat.models.hub.manifest import Installed

GUIDE = "guide"
LAST_USED = "the model used last"
IN_COMMAND = "the model named in the command"
_MAX_SHOWN_NAMES = 6
"""Limit on the model names that an error lists."""
_LAST_MODEL = "last-model"
"""A plain text file, because a path may contain bytes that JSON cannot."""


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model file that exists, or the model of a remote server."""

    word: str
    """Name by which `locate` finds the model again."""
    name: str
    """Name that is shown: the alias if the user chose one."""
    path: Path
    """Meaningless for a remote model."""
    why: str
    """Source of the choice, as error messages show it."""
    remote: Remote | None = None
    notice: str = ""
    """Sentence for the user, if another model than the named one answers."""
    target: str = ""
    """Name of the model behind an alias. Empty without one."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, for its settings and its catalogue entry."""
        return tuple(dict.fromkeys(filter(None, (self.target, self.name, self.word))))


def locate(
    name: str, paths: Paths, why: str, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """Return the model with this name. environ: locates the folders of other programs.

    Raises ModelMissing if no model has the name, UsageError for a folder without a checkpoint.
    """
    if name == GUIDE:
        return _locate(name, paths, why, environ)
    if not name.strip():
        raise UsageError(
            f"the name of a model cannot be empty ({why})", hint="localchat list shows those here"
        )
    from localchat.models.aliases import find_alias, read_aliases

    # No alias is a path, so a damaged file of aliases does not matter for one.
    alias: ModelAlias | None = None
    if "/" not in name:
        alias = find_alias(name, read_aliases(paths))
    if alias is not None:
        model = _target_of(alias, paths, why, environ)
        return msgspec.structs.replace(
            model, word=alias.name, name=alias.name, target=model.name, why=why
        )
    return _locate(name, paths, why, environ)


def locate_named(
    name: str, paths: Paths, why: str, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """Return the model of this name for server clients, which may not choose files.

    Never a path, except through an alias of the owner. Raises ModelMissing, UsageError.
    """
    from localchat.models.aliases import find_alias, read_aliases
    from localchat.models.external.discovery import find_external_file
    from localchat.models.gguf_files import find_in_folder

    if name == GUIDE or find_alias(name, read_aliases(paths)):
        return locate(name, paths, why, environ)
    if stored := find_in_folder(name, paths.models_dir) or find_external_file(name, environ):
        return ResolvedModel(name, name, stored, why)
    if _is_path(name):
        raise ModelMissing(f"no model {name!r}{_chosen(why)}")
    return _pulled(name, paths, why, environ)


def _target_of(
    alias: "ModelAlias", paths: Paths, why: str, environ: Mapping[str, str]
) -> ResolvedModel:
    """Return the model behind an alias. Raises ModelMissing with the way to repair the alias."""
    source = f"the alias {alias.name}"
    if _chosen(why):
        source = f"{source}; {why}"
    try:
        return _locate(alias.target, paths, source, environ)
    except ModelMissing as problem:
        if _is_path(alias.target):
            problem.hint = f"if it has moved: localchat import PATH {alias.name}"
        raise


def planned_load(
    settings: Settings, paths: Paths, *, max_slots: int = LoadOptions().max_slots
) -> LoadOptions:
    """Return the load options of these settings, with the files of their draft model and encoder.

    Raises ModelMissing, ModelInvalid, UsageError for these files.
    """
    options = load_options(settings, max_slots=max_slots)
    if settings.mmproj is not None:
        options = msgspec.structs.replace(options, mmproj=_encoder_file(settings.mmproj))
    if settings.lora:
        adapters = tuple(map(parse_adapter, settings.lora))
        options = msgspec.structs.replace(options, lora=adapters)
    if settings.draft is None:
        return options
    draft = locate(settings.draft, paths, "the draft model")
    return msgspec.structs.replace(options, draft=os.fspath(draft.path))


def _encoder_file(name: str) -> str:
    """Return the absolute path of an encoder of attachments, or `none`. Raises ModelMissing."""
    if name == "none":
        return name
    path = expand_home(name).absolute()
    if not path.is_file():
        raise ModelMissing(
            f"there is no file {name} (--mmproj)",
            hint="give the path of the GGUF that lets the model see or hear, or none",
        )
    return os.fspath(path)


def parse_adapter(text: str) -> LoraAdapter:
    """Return the adapter of `PATH` or `PATH:SCALE`, with an absolute path. Raises ModelMissing, UsageError."""
    name = text
    scale = 1.0
    stem, colon, number = text.rpartition(":")
    if colon and _is_number(number) and not expand_home(text).exists():
        name = stem
        scale = float(number)
    if not abs(scale) <= MAX_LORA_SCALE:
        raise UsageError(
            f"--lora: the scale of {name} is {number}; expected -{MAX_LORA_SCALE:g} to {MAX_LORA_SCALE:g}"
        )
    path = expand_home(name).absolute()
    if not path.exists():
        raise ModelMissing(
            f"there is no file or folder {name} (--lora)",
            hint="give the path of an adapter in GGUF, or of a folder with adapter_config.json",
        )
    if not (path.is_file() or path.is_dir()):
        raise UsageError(f"{name} is a pipe or a device, not a file (--lora)")
    return LoraAdapter(os.fspath(path), scale)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def remote_model(remote: Remote, why: str) -> ResolvedModel:
    """Return the model of a remote server."""
    name = f"{remote.model} on {remote.name}" if remote.model else remote.name
    return ResolvedModel(remote.word, name, Path(remote.name), why, remote)


def _locate(name: str, paths: Paths, why: str, environ: Mapping[str, str]) -> ResolvedModel:
    """Find the model that a path or a name means. Raises ModelMissing, UsageError."""
    if name == GUIDE:
        return ResolvedModel(GUIDE, GUIDE, _guide(why), why)
    from localchat.models.external.discovery import find_external_file, missing_external
    from localchat.models.gguf_files import find_in_folder

    path = expand_home(name)
    try:
        is_there = path.exists()
    except OSError as problem:  # a folder that is closed to this user, or a name that is too long
        raise ModelMissing(f"{name} cannot be read{_chosen(why)}: {reason(problem)}") from problem
    if is_there:
        file = path.absolute()
        if (path / "config.json").is_file():
            return ResolvedModel(str(file), sanitize_line(path.name), file, why)
        if path.is_dir():
            raise UsageError(f"{name} is a folder ({why})", hint=_inside(path))
        return ResolvedModel(str(file), sanitize_line(path.stem), file, why)
    if stored := find_in_folder(name, paths.models_dir):
        return ResolvedModel(name, name, stored, why)
    if external := find_external_file(name, environ):
        return ResolvedModel(name, name, external, why)
    if not _is_path(name):
        return _pulled(name, paths, why, environ)
    hint = "give the path of a GGUF file that exists"
    if name.startswith(("http://", "https://")):
        hint = f"to use the server at this address: localchat --remote {name}"
    raise missing_external(name, why) or ModelMissing(
        f"there is no file {name}{_chosen(why)}", hint=hint
    )


def _of_other_program(name: str, why: str, environ: Mapping[str, str]) -> ResolvedModel | None:
    """Return the model of another program whose name ends like this. Raises UsageError for several."""
    from localchat.models.external.discovery import find_by_suffix

    model = find_by_suffix(name, environ)
    if model is None or model.path is None:
        return None
    return ResolvedModel(
        model.name, model.name, model.path, why, notice=f"using {model.name} for {name}"
    )


def _pulled(typed: str, paths: Paths, why: str, environ: Mapping[str, str]) -> ResolvedModel:
    """Return a pulled model by any of its names, or the model of another program.

    Raises ModelMissing with the command that fetches it or with similar names, UsageError for several.
    """
    from localchat.models.catalog import read_catalog
    from localchat.models.external.discovery import missing_external
    from localchat.models.hub.manifest import installed
    from localchat.models.names import entry_of_file, find_pulled, parse

    models = installed(paths.models_dir)
    name = typed.lower()
    matches = [model for model in models if name in (model.manifest.name.lower(), model.family)]
    if len(matches) == 1:
        return _complete(matches[0], why)
    catalogue = read_catalog(paths)
    try:
        reference = parse(typed, catalogue)
    except UsageError as problem:  # a family of the catalogue, such as qwen2.5
        if other := _of_other_program(typed, why, environ):
            return other
        others = _other_files(models, paths, environ)
        here = [sanitize_line(other) for other in others if other.lower().startswith(name)]
        if here:
            problem.hint = f"on this machine: {', '.join(here)}\n{problem.hint}"
        raise
    except ModelMissing as problem:
        return _unknown_name(typed, models, catalogue, paths, why, environ, problem)
    if model := find_pulled(reference, models):
        return _complete(model, why)
    if other := _of_other_program(typed, why, environ):
        return other
    hint = f"download it: localchat pull {reference.name}"
    for other_name, path in _other_files(models, paths, environ).items():
        if reference.entry is not None and entry_of_file(path, catalogue) is reference.entry:
            hint = f"the same model is here under another name: {sanitize_line(other_name)}\n{hint}"
            break
    raise missing_external(typed, why) or ModelMissing(
        f"{typed} is not here{_chosen(why)}", hint=hint, pull=reference.name
    )


def _complete(model: "Installed", why: str) -> ResolvedModel:
    """Return a pulled model. Raises ModelMissing if a file of it is missing."""
    name = model.manifest.name
    if not model.complete:
        raise ModelMissing(
            f"a file of {name} is missing in {model.folder}{_chosen(why)}",
            hint=f"fetch it again: localchat pull {name}",
            pull=name,
        )
    return ResolvedModel(name, name, model.path, why)


def _other_files(
    models: "Sequence[Installed]", paths: Paths, environ: Mapping[str, str]
) -> dict[str, Path]:
    """Return the files that were not pulled, by name: aliases of files, loose files, other programs' models."""
    from localchat.models.aliases import read_aliases
    from localchat.models.external.discovery import find_external_models

    aliases = {name: Path(target) for name, target in read_aliases(paths).aliases.items()}
    external = find_external_models(environ).models
    return {
        **{name: path for name, path in aliases.items() if path.is_absolute() and path.exists()},
        **loose_files(models, paths),
        **{model.name: model.path for model in external if model.path is not None},
    }


def loose_files(models: "Sequence[Installed]", paths: Paths) -> dict[str, Path]:
    """Return the files of the models folder that were not pulled, by name."""
    from localchat.models.gguf_files import models_in_folder

    listed = {file for model in models for file in model.files}
    files = models_in_folder(paths.models_dir)
    return {name: path for name, path in files.items() if path not in listed}


def _unknown_name(
    typed: str,
    models: "Sequence[Installed]",
    catalogue: "Catalog",
    paths: Paths,
    why: str,
    environ: Mapping[str, str],
    problem: ModelMissing,
) -> ResolvedModel:
    """Return the loose file or other program's model for a name that the catalogue lacks.

    Raises ModelMissing with similar names.
    """
    from localchat.models.aliases import read_aliases
    from localchat.models.external.discovery import find_external_models
    from localchat.models.names import quantizations_hint, similar_names

    loose = loose_files(models, paths)
    # Letter case does not matter, as with other names.
    matches = [name for name in loose if name.casefold() == typed.casefold()]
    if len(matches) == 1:
        return ResolvedModel(matches[0], matches[0], loose[matches[0]], why)
    if other := _of_other_program(typed, why, environ):
        return other
    external = [model.name for model in find_external_models(environ).models if model.path]
    own = {
        *(model.manifest.name for model in models),
        *loose,
        *read_aliases(paths).aliases,
        *external,
    }
    similar = quantizations_hint(typed, catalogue) or similar_names(typed, catalogue, own)
    yours = [sanitize_line(name) for name in sorted({GUIDE, *own})]
    more = ""
    if len(yours) > _MAX_SHOWN_NAMES:
        more = ", … (localchat list)"
    raise ModelMissing(
        f"no model {typed!r}{_chosen(why)}",
        hint=f"{similar}\nYour models: {', '.join(yours[:_MAX_SHOWN_NAMES])}{more}. To download one: "
        "localchat pull NAME. A path to a GGUF file works too.",
    ) from problem


def locate_default(
    chosen: str | None, chosen_by: str, paths: Paths, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """Return the model if the command names none: the `chosen` one, else the last used, else the guide.

    Raises ModelMissing.
    """
    if chosen is not None:
        return locate(chosen, paths, chosen_by, environ)
    last = last_model(paths)
    notice = ""
    if last is not None:
        try:
            return locate(last, paths, LAST_USED, environ)
        except (ModelMissing, ModelInvalid, UsageError):
            notice = f"{sanitize_line(last)}, {LAST_USED}, is not here any more; the guide answers"
    try:
        guide = locate(GUIDE, paths, "the built-in model")
        return msgspec.structs.replace(guide, notice=notice)
    except ModelMissing as problem:
        raise ModelMissing(
            "no model was named, and none is installed",
            hint="name one: localchat run PATH.gguf, or set LOCALCHAT_MODEL to its path",
        ) from problem


def last_model(paths: Paths) -> str | None:
    """Return the name of the model of the last run."""
    try:
        name = (paths.state_dir / _LAST_MODEL).read_text("utf-8", "surrogateescape").strip()
    except OSError:
        return None
    # A power failure may leave a file of zeros. No name contains one.
    return None if not name or "\0" in name else name


def remember_model(model: ResolvedModel, paths: Paths) -> None:
    """Make this the model of the next run. Raises OSError."""
    if last_model(paths) != model.word:
        write_text(paths.state_dir / _LAST_MODEL, f"{model.word}\n")


def _guide_file() -> Path:
    import localchat

    return Path(localchat.__file__).with_name("guide") / "guide.gguf"


def _guide(why: str) -> Path:
    path = _guide_file()
    if not path.is_file():
        raise ModelMissing(
            f"the built-in guide is not part of this installation ({why})",
            hint="give the path of a GGUF file: localchat run PATH.gguf",
        )
    return path


def _chosen(why: str) -> str:
    """Return the source of a choice for a message. Empty if the user named the model in the command."""
    if why in ("", IN_COMMAND, "--model"):
        return ""
    return f" ({why})"


def _is_path(name: str) -> bool:
    if name.startswith((".", "~", "/")) or name.lower().endswith(".gguf"):
        return True
    if "/" not in name:
        return False
    from localchat.models.names import is_hub_name

    return not is_hub_name(name)


def _inside(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if not names:
        return "it holds no GGUF file; give the path of one"
    return f"give one of the files in it: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
