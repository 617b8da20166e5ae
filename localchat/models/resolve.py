"""Resolves the word for a model to its file: a path, the guide, a loose file, an alias or a pulled name.

Remembers the model of the last run in the state folder. Catalogue and manifests are read only for words that
are nothing simpler: this runs before every first frame and every first token.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from localchat.atomic import write_text
from localchat.config.paths import Paths, expand_home
from localchat.config.remotes import Remote
from localchat.config.routes import Route
from localchat.config.settings import Settings
from localchat.engine.options import load_options
from localchat.errors import ModelInvalid, ModelMissing, UsageError, reason
from localchat.fit.load_options import LoadOptions

GUIDE = "guide"
LAST_USED = "the model used last"
IN_COMMAND = "the model named in the command"
_SHOWN_NAMES = 6
"""Names of models that an error lists."""
_LAST_MODEL = "last-model"
"""A plain text file: a path may hold bytes that JSON cannot."""


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model file that exists, or the model of a remote server."""

    word: str
    """Finds the model again."""
    name: str
    path: Path
    """Without meaning for a remote one."""
    why: str
    """Who chose it, a phrase."""
    remote: Remote | None = None
    route: "ResolvedRoute | None" = None
    notice: str = ""
    """A sentence for the user, if the word was not the name of the model."""

    @property
    def is_composed(self) -> bool:
        """Whether it is no single file of this machine, which a plan or a record could be about."""
        return self.remote is not None or self.route is not None


class ResolvedRoute(msgspec.Struct, frozen=True):
    """A route with the models that its words mean."""

    route: Route
    small: ResolvedModel
    large: ResolvedModel


def locate(
    word: str, paths: Paths, why: str, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """The model that `word` means. `environ`: for the folders of other programs.

    Raises ModelMissing with the places that were searched, UsageError for a folder without a checkpoint.
    """
    if word == GUIDE:
        return _locate(word, paths, why, environ)
    if not word.strip():
        raise UsageError(
            f"the name of a model cannot be empty ({why})", hint="localchat list shows those here"
        )
    from localchat.models.aliases import read_aliases

    if target := read_aliases(paths).aliases.get(word):
        return msgspec.structs.replace(
            _locate(target, paths, f"{word} is its alias; {why}", environ), word=word
        )
    return _locate(word, paths, why, environ)


def locate_named(
    word: str, paths: Paths, why: str, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """The model of this name, for clients of the server, which may not choose files.

    Never a path, except through an alias of the owner. Raises ModelMissing, UsageError.
    """
    from localchat.models.aliases import read_aliases
    from localchat.models.external.discovery import find_external_file
    from localchat.models.gguf_files import find_in_folder

    if word == GUIDE or word in read_aliases(paths).aliases:
        return locate(word, paths, why, environ)
    if stored := find_in_folder(word, paths.models_dir) or find_external_file(word, environ):
        return ResolvedModel(word, word, stored, why)
    if _is_path(word):
        raise ModelMissing(f"no model {word!r}{_chosen(why)}")
    return _pulled(word, paths, why, environ)


def planned_load(
    settings: Settings, paths: Paths, *, max_slots: int = LoadOptions().max_slots
) -> LoadOptions:
    """The load that these settings ask for, with the file of their draft model.

    Raises ModelMissing, ModelInvalid, UsageError for the draft model.
    """
    options = load_options(settings, max_slots=max_slots)
    if settings.draft is None:
        return options
    found = locate(settings.draft, paths, "the draft model")
    return msgspec.structs.replace(options, draft=os.fspath(found.path))


def remote_model(remote: Remote, why: str) -> ResolvedModel:
    """The model of a remote server."""
    name = f"{remote.model} on {remote.name}" if remote.model else remote.name
    return ResolvedModel(remote.word, name, Path(remote.name), why, remote)


def route_model(
    route: Route, paths: Paths, why: str, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """The two models of a route. Raises ModelMissing, UsageError."""
    small, large = (
        locate(word, paths, f"{route.word} names it", environ)
        for word in (route.small, route.large)
    )
    found = ResolvedRoute(route, small, large)
    return ResolvedModel(route.word, route.word, small.path, why, route=found)


def _locate(word: str, paths: Paths, why: str, environ: Mapping[str, str]) -> ResolvedModel:
    if word == GUIDE:
        return ResolvedModel(GUIDE, GUIDE, _guide(why), why)
    from localchat.models.external.discovery import find_external_file, missing_external
    from localchat.models.gguf_files import find_in_folder

    given = expand_home(word)
    try:
        is_there = given.exists()
    except OSError as problem:  # a folder that is closed to this user, or a name that is too long
        raise ModelMissing(f"{word} cannot be read{_chosen(why)}: {reason(problem)}") from problem
    if not is_there:
        if stored := find_in_folder(word, paths.models_dir):
            return ResolvedModel(word, word, stored, why)
        if external := find_external_file(word, environ):
            return ResolvedModel(word, word, external, why)
    if _is_path(word) or is_there:
        from localchat.model_files.checkpoint import is_checkpoint

        if is_checkpoint(given) or (given / "config.json").is_file():
            return ResolvedModel(str(given.absolute()), given.name, given.absolute(), why)
        if given.is_dir():
            raise UsageError(f"{word} is a folder ({why})", hint=_inside(given))
        if not is_there:
            raise missing_external(word, why) or ModelMissing(
                f"there is no file {word}{_chosen(why)}",
                hint="give the path of a GGUF file that exists",
            )
        return ResolvedModel(str(given.absolute()), given.stem, given.absolute(), why)
    return _pulled(word, paths, why, environ)


def _of_other_program(word: str, why: str, environ: Mapping[str, str]) -> ResolvedModel | None:
    """Return the model of another program whose name ends with this word. Raises UsageError for several."""
    from localchat.models.external.discovery import find_by_suffix

    model = find_by_suffix(word, environ)
    if model is None or model.path is None:
        return None
    return ResolvedModel(
        model.name, model.name, model.path, why, notice=f"using {model.name} for {word}"
    )


def _pulled(word: str, paths: Paths, why: str, environ: Mapping[str, str]) -> ResolvedModel:
    """A pulled model, by any of its names, or the model of another program whose name ends with the word.

    Raises ModelMissing with the command that fetches it or with similar names, UsageError for several.
    """
    from localchat.models.catalog import read_catalog
    from localchat.models.external.discovery import missing_external
    from localchat.models.gguf_files import models_in_folder
    from localchat.models.hub.manifest import installed
    from localchat.models.names import find_pulled, parse, quantizations_hint, similar_names

    models = installed(paths.models_dir)
    named = [one for one in models if word.lower() in (one.manifest.name.lower(), one.family)]
    if len(named) == 1:
        found = named[0]
    else:
        catalogue = read_catalog(paths)
        try:
            reference = parse(word, catalogue)
        except UsageError:  # a family of the catalogue, such as qwen2.5
            if other := _of_other_program(word, why, environ):
                return other
            raise
        except ModelMissing as problem:
            listed = {file for one in models for file in one.files}
            loose = {
                name: path
                for name, path in models_in_folder(paths.models_dir).items()
                if path not in listed
            }
            same = [name for name in loose if name.casefold() == word.casefold()]
            if len(same) == 1:  # letter case does not matter, as with other names
                return ResolvedModel(same[0], same[0], loose[same[0]], why)
            if other := _of_other_program(word, why, environ):
                return other
            names = {*catalogue, *(one.manifest.name for one in models), *loose}
            near = quantizations_hint(word, catalogue) or similar_names(word, names)
            yours = sorted({GUIDE, *(one.manifest.name for one in models), *loose})
            more = ", … (localchat list)" if len(yours) > _SHOWN_NAMES else ""
            raise ModelMissing(
                f"no model {word!r}{_chosen(why)}",
                hint=f"{near}\nYour models: {', '.join(yours[:_SHOWN_NAMES])}{more}. To download one: "
                "localchat pull NAME. A path to a GGUF file works too.",
            ) from problem
        here = find_pulled(reference, models)
        if here is None and (other := _of_other_program(word, why, environ)):
            return other
        if here is None:
            raise missing_external(word, why) or ModelMissing(
                f"{word} is not here{_chosen(why)}",
                hint=f"download it: localchat pull {reference.name}",
                pull=reference.name,
            )
        found = here
    name = found.manifest.name
    if not found.complete:
        raise ModelMissing(
            f"a file of {name} is missing in {found.folder}{_chosen(why)}",
            hint=f"fetch it again: localchat pull {name}",
            pull=name,
        )
    return ResolvedModel(name, name, found.path, why)


def locate_default(
    chosen: str | None, chosen_by: str, paths: Paths, environ: Mapping[str, str] = os.environ
) -> ResolvedModel:
    """The model where the command names none: the `chosen` one, else the last used, else the guide.

    Raises ModelMissing.
    """
    if chosen is not None:
        return locate(chosen, paths, chosen_by, environ)
    last = last_model(paths)
    if last is not None:
        try:
            return locate(last, paths, LAST_USED, environ)
        except (ModelMissing, ModelInvalid, UsageError):
            pass  # it is gone; the guide answers, and the answer names its model anyway
    try:
        return locate(GUIDE, paths, "the built-in model")
    except ModelMissing as problem:
        raise ModelMissing(
            "no model was named, and none is installed",
            hint="name one: localchat run PATH.gguf, or set LOCALCHAT_MODEL to its path",
        ) from problem


def last_model(paths: Paths) -> str | None:
    """The word of the model of the last run."""
    try:
        return (paths.state_dir / _LAST_MODEL).read_text("utf-8", "surrogateescape").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


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
    """Source of the choice of a model, for a message; empty if the command itself did: its user knows."""
    return "" if why in ("", IN_COMMAND, "--model") else f" ({why})"


def _is_path(word: str) -> bool:
    if word.startswith((".", "~", "/")) or word.lower().endswith(".gguf"):
        return True
    if "/" not in word:
        return False
    from localchat.models.names import is_hub_name

    return not is_hub_name(word)


def _inside(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if not names:
        return "it holds no GGUF file; give the path of one"
    return f"give one of the files in it: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
