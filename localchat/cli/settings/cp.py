"""Command `localchat config cp`: give a model another name. No file is copied."""

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.cli.output import print_json
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.errors import UsageError
from localchat.sanitize import sanitize_line


@click.command("cp")
@click.argument("model_name", metavar="MODEL", shell_complete=complete_model)
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, model_name: str, name: str, as_json: bool) -> None:
    """Give a model another name.

    After another pull of the model, the alias names the new files. `localchat rm NAME` removes the alias alone.
    """
    from localchat.models.aliases import add_alias, check_name, read_aliases
    from localchat.models.index import read_index
    from localchat.models.resolve import IN_COMMAND, locate

    paths = find_paths(app.environ)
    check_name(name)
    model = locate(model_name, paths, IN_COMMAND, app.environ)
    target = read_aliases(paths).aliases.get(model_name, model.word)
    existing = read_index(paths, app.environ).find(name)
    if existing is not None and existing.kind != "alias":
        raise UsageError(f"there is a model {existing.name} already", hint="choose another name")
    add_alias(paths, name, target)
    if as_json:
        print_json(app.environ, {"name": name, "alias_of": target, "path": str(model.path)})
    else:
        tell(f"localchat: {sanitize_line(name)} is now an alias of {sanitize_line(target)}")
