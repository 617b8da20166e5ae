"""Imports a model into the models folder under a name: by a link, or by a copy on request."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from localchat.errors import LocalchatError, UsageError, reason
from localchat.units import size

How = Literal["hard link", "symbolic link", "copy"]


class Linked(NamedTuple):
    """The model in the models folder. `path`: of a split model the first part."""

    path: Path
    how: How


def link_model(files: Sequence[Path], models_dir: Path, name: str, how: How) -> Linked:
    """Link or copy these files (all parts of one model) to `name`, all or none.

    A hard link that the file system refuses becomes a symbolic one. Raises UsageError where the name is taken,
    LocalchatError.
    """
    targets = list(_targets(len(files), models_dir, name))
    for target in targets:
        if target.exists() or target.is_symlink():
            raise UsageError(
                f"there is a model {name} already: {target}",
                hint=f"give another name, or remove it first: localchat rm {name}",
            )
    made: list[Path] = []
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        if how == "copy":
            _check_free_space(files, models_dir)
        for source, target in zip(files, targets, strict=True):
            how = _make(source.resolve(), target, how)
            made.append(target)
    except BaseException as problem:
        for target in made:
            target.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise LocalchatError(
                f"{name} cannot be put into {models_dir}: {reason(problem)}"
            ) from problem
        raise
    return Linked(targets[0], how)


def _targets(count: int, models_dir: Path, name: str) -> Iterator[Path]:
    if count == 1:
        yield models_dir / f"{name}.gguf"
        return
    for number in range(1, count + 1):
        yield models_dir / f"{name}-{number:05}-of-{count:05}.gguf"


def _make(source: Path, target: Path, how: How) -> How:
    if how == "copy":
        _copy(source, target)
        return how
    if how == "hard link":
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            pass  # another disk or owner, or a file system without hard links
        else:
            return how
    target.symlink_to(source)
    return "symbolic link"


def _copy(source: Path, target: Path) -> None:
    """Copy under a temporary name, then rename."""
    temporary = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check_free_space(files: Sequence[Path], folder: Path) -> None:
    needed = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise LocalchatError(
            f"a copy takes {size(needed)}, and {folder} has {size(free)} free",
            hint="without --copy it is a link and takes nothing",
        )
