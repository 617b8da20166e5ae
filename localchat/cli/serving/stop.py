"""Command `localchat stop`: stop a running server, or unload one of its models."""

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError, ModelMissing


@click.command("stop")
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete_model)
@click.pass_obj
def command(app: AppContext, model: str | None) -> None:
    """Stop the running server, or unload one of its models.

    Requests that use the model end with an error.
    """
    from localchat.cli.attach import running_servers

    servers = [server for server, _ in running_servers(find_paths(app.environ))]
    if not servers:
        raise LocalchatError(
            "no server is running",
            hint="prompts and conversations unload their own models when they end",
        )
    if model is None:
        for server in servers:
            server.stop(None)
            tell(f"localchat: stopping the server at {server.url}")
        return
    for server in servers:
        stopped = server.stop(model)
        if stopped.ended is not None:
            message = f"localchat: {server.url} unloaded {model}"
            if stopped.ended:
                message += f" and cancelled {stopped.ended} requests"
            tell(message)
            return
    raise ModelMissing(f"{model} is not loaded", hint="localchat ps lists the loaded models")
