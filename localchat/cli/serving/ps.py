"""Command `localchat ps`: list the models of running servers, and their clients."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_lines, table
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.sanitize import sanitize_line
from localchat.units import duration, size

if TYPE_CHECKING:
    from localchat.pool.entry import ModelStatus

_HEAD = ("NAME", "MEMORY", "KV CACHE", "CONTEXT", "CLIENTS", "STATE")


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, as_json: bool) -> None:
    """List the models that the running server has loaded.

    The list shows their memory (weights, KV cache and buffers, as `fit` plans them), the part of each GPU if
    there are several, their clients, and when idle models will be unloaded. It omits models that a prompt or
    a conversation loads for itself, which are unloaded when it ends.
    """
    import msgspec

    from localchat.cli.attach import running_servers

    servers = [(server.url, models) for server, models in running_servers(find_paths(app.environ))]
    if as_json:
        records: list[dict[str, Any]] = [
            {"server": url, **msgspec.structs.asdict(model)}
            for url, models in servers
            for model in models
        ]
        print_json(app.environ, records)
        return
    if not servers:
        tell("localchat: no server is running; localchat serve starts one")
        return
    print_lines(app.environ, _lines(servers))


def _lines(servers: "list[tuple[str, tuple[ModelStatus, ...]]]") -> Iterator[str]:
    for url, models in servers:
        if not models:
            yield f"{url}: no model is loaded"
            continue
        yield url
        yield from table(_HEAD, (_cells(model) for model in models), right=(1, 2, 3))
        for model in models:
            for number, part in enumerate(model.gpu_parts):
                yield f"  {sanitize_line(model.name)}, GPU {number}: {part.text}"


def _cells(model: "ModelStatus") -> tuple[str, ...]:
    clients = sorted(set(model.clients))
    return (
        sanitize_line(" + ".join((model.name, *model.lora))),
        size(model.memory_bytes),
        size(model.kv_bytes) if model.kv_bytes else "-",
        f"{model.context_tokens:,}" if model.context_tokens else "-",
        sanitize_line(", ".join(client or "unnamed" for client in clients)) or "-",
        _state(model),
    )


def _state(model: "ModelStatus") -> str:
    if model.state == "loading":
        return "loading"
    if model.state == "ended":
        return "ended; the next request starts it again"
    if model.clients:
        requests = f"{model.running} running"
        if model.waiting:
            requests += f", {model.waiting} waiting"
        return requests
    idle = f"idle for {duration(model.idle_s)}"
    if model.unloads_in_s is None:
        return idle
    return f"{idle}, unloads in {duration(model.unloads_in_s)}"
