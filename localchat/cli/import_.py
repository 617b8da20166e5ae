"""`localchat import PATH [NAME]`: a file under a name, by a link; or a folder, whose models are listed."""

from pathlib import Path

import click

from localchat.cli.door import Door


@click.command("import")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--symlink", "how", flag_value="symbolic link", help="Link by path, not by file.")
@click.option("--copy", "how", flag_value="copy", help="Copy the file instead of linking it.")
@click.option("--forget", is_flag=True, help="Look into this folder no longer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    door: Door, path: Path, name: str | None, how: str | None, forget: bool, as_json: bool
) -> None:
    """Use a model file under a name, or all models of a folder.

    A file gets a link in the models folder and is not copied: a hard link, which outlives the file, or a
    symbolic one where that is impossible. A folder is looked into from now on, and its models stay in it.
    """
    from localchat.errors import UsageError

    given = path.expanduser().absolute()
    if forget or given.is_dir():
        if name is not None or how is not None:
            raise UsageError(
                "a folder is looked into as it is: it takes no name, --symlink or --copy"
            )
        _folder(door, given, forget=forget, as_json=as_json)
    else:
        _file(door, given, name, how or "hard link", as_json=as_json)


def _file(door: Door, path: Path, name: str | None, how: str, *, as_json: bool) -> None:
    from typing import cast

    from localchat.backends import backend_for
    from localchat.cli.page import print_json
    from localchat.errors import UsageError
    from localchat.fit.header import read_header
    from localchat.fit.words import size
    from localchat.library.bookmarks import check_name
    from localchat.library.links import How, link_model
    from localchat.library.origins import plain_stem
    from localchat.library.shelf import read_shelf
    from localchat.paths import find_paths

    header = read_header(path)
    chosen = plain_stem(path) if name is None else name
    check_name(chosen)
    paths = find_paths(door.environ)
    there = read_shelf(paths, door.environ).find(chosen)
    if there is not None:
        raise UsageError(
            f"there is a model {there.name} already ({there.origin})",
            hint="give another name behind the path",
        )
    linked = link_model(header.parts, paths.models_dir, chosen, cast(How, how))
    told = {
        "name": chosen,
        "path": str(linked.path),
        "how": linked.how,
        "source": str(path),
        "size_bytes": header.file_bytes,
        "warning": backend_for(linked.path).objection(header) or None,
    }
    if as_json:
        print_json(door.environ, told)
        return
    click.echo(
        f"localchat: {chosen} is {linked.path}, a {linked.how} ({size(header.file_bytes)})",
        err=True,
    )
    if told["warning"]:
        click.echo(f"localchat: it cannot be run: {told['warning']}", err=True)


def _folder(door: Door, folder: Path, *, forget: bool, as_json: bool) -> None:
    from localchat.cli.page import print_json
    from localchat.errors import UsageError
    from localchat.library.adopt import adopt
    from localchat.library.bookmarks import add_folder, remove_folder
    from localchat.library.origins import FOLDER
    from localchat.paths import find_paths

    paths = find_paths(door.environ)
    if forget:
        if not remove_folder(paths, folder):
            raise UsageError(f"{folder} is not among the folders that are looked into")
        if as_json:
            print_json(door.environ, {"folder": str(folder), "models": []})
        else:
            click.echo(f"localchat: {folder} is looked into no longer; its files stay", err=True)
        return
    add_folder(paths, folder)
    models = [
        model
        for model in adopt(door.environ, origins=(FOLDER,)).models
        if model.path is not None and model.path.is_relative_to(folder)
    ]
    if as_json:
        names = [{"name": model.name, "path": str(model.path)} for model in models]
        print_json(door.environ, {"folder": str(folder), "models": names})
        return
    click.echo(
        f"localchat: {folder} is looked into from now on; models in it: {len(models)}", err=True
    )
    for model in models:
        click.echo(f"  {model.name}", err=True)
