"""Command `localchat acp`: answer an editor as an agent of the Agent Client Protocol."""

import logging
import os
import stat
import sys
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from localchat.cli.options import SharedOption, engine_options
from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.tools.tool import Effect


@click.command("acp")
@click.option("--yes", is_flag=True, help="Allow tool calls that only read without asking.")
@engine_options(with_model=True, cls=SharedOption)
@click.pass_context
def command(ctx: click.Context, /, yes: bool, **_: object) -> None:
    """Be the agent of an editor, over the Agent Client Protocol.

    Editors such as Zed, and toad, start this command and talk to it over stdin and stdout. It can use
    the tools of --tools, by default those that read and change files of the project. Each call needs the
    consent of the user, and the editor asks for it.
    """
    try:
        import acp
    except ImportError as problem:
        raise UsageError(
            "the Agent Client Protocol needs the package agent-client-protocol, which is not installed",
            hint="install it: pip install 'localchat-app[acp]'",
        ) from problem
    import asyncio

    from acp.stdio import stdio_streams

    from localchat import gc_control
    from localchat.acp.agent import LocalchatAgent
    from localchat.acp.messages import MAX_LINE_BYTES, MessageStream
    from localchat.cli.chat.conversation_options import open_for_session
    from localchat.cli.chat.session_context import session_context
    from localchat.cli.resolve import resolve_setup
    from localchat.cli.signals import terminate_gracefully
    from localchat.session.engine_holder import EngineHolder

    for stream in (sys.stdin, sys.stdout):
        if stream is None or stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise UsageError(
                "an editor talks to this command over pipes, and stdin or stdout is a file or closed"
            )
    setup = resolve_setup(ctx)
    terminal = setup.terminal
    if sys.stdin.isatty():
        terminal.notify("an editor starts this command; Ctrl+D ends it")

    allowed: frozenset[Effect] = frozenset({"read"} if yes else ())
    context, model_setup = session_context(setup)

    async def serve() -> None:
        engines = EngineHolder()
        engines.listen(terminal.notify)
        engines.open(model_setup.open_engine)
        open_history = partial(open_for_session, setup)
        agent = LocalchatAgent(context, model_setup, engines, open_history, allowed=allowed)
        try:
            reader, writer = await stdio_streams(limit=MAX_LINE_BYTES)
            # The library finds methods by their names. It rejects requests without one.
            await acp.run_agent(cast("acp.Agent", agent), MessageStream(reader, writer))
        finally:
            await agent.close()
            await asyncio.to_thread(engines.close)

    # The library logs tracebacks about requests that fail, which editors show.
    logging.getLogger().setLevel(logging.CRITICAL)
    gc_control.resume_gc()
    with terminate_gracefully():
        asyncio.run(serve())
