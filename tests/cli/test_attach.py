"""A prompt beside a running server: attached to and told in one line; without a server it does alone."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette

from localchat.cli.attach import choose_server
from localchat.cli.serving.serve import running_server_notices
from localchat.config.paths import Paths, find_paths
from localchat.config.settings import Settings
from localchat.engine.attached.engine import ServerClient
from localchat.engine.interface import GpuPart
from localchat.engine.options import EngineOptions
from localchat.models.resolve import ResolvedModel
from localchat.pool.entry import ModelStatus
from localchat.pool.pool import EnginePool
from localchat.pool.server_registry import register
from localchat.server.bootstrap import ServerSpec, open_server_context
from tests.support.cli_program import ScriptedApp, answer
from tests.support.gguf_files import write_model
from tests.support.local_api_server import until
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine
from tests.support.terminal_screen import Call

HERE = answer("from here\n")


class Served:
    """`opened`: what the server's pool loaded."""

    def __init__(self) -> None:
        self.opened: list[EngineOptions] = []
        self.engine = ScriptedEngine(
            script=lambda request: ScriptedAnswer(pieces=("from the server",))
        )
        self.stopped = threading.Event()
        self.ends = True
        """False: a server that does not end when it is stopped."""
        self.pool: EnginePool | None = None

    def open(self, options: EngineOptions, say: Callable[[str], None]) -> ScriptedEngine:
        self.opened.append(options)
        self.engine.closed = False
        return self.engine


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Paths:
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "all"))
    return find_paths({"LOCALCHAT_DATA_DIR": str(tmp_path / "all")})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf", "llama")


@pytest.fixture
def served(paths: Paths, model: Path) -> Iterator[Served]:
    """A server with a model of its own, registered until the end of the test."""
    served = Served()
    load_options = ServerSpec(
        own=ResolvedModel(str(model), "tiny", model, "a test"),
        settings_for=lambda names: Settings(),
        paths=paths,
        environ={},
        open_engine=served.open,
        notify=lambda text: None,
        keep_alive_s=-1.0,
    )
    with open_server_context(load_options) as server_context, socket.socket() as listening:
        served.pool = server_context.engines.pool
        listening.bind(("127.0.0.1", 0))
        listening.listen(32)

        def stop() -> None:
            if served.ends:
                for file in (paths.state_dir / "servers").iterdir():
                    file.unlink()  # as the end of a server does
            served.stopped.set()

        server_context.on_stop(stop)
        app = Starlette(routes=server_context.private)
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            with server_context.registered(f"http://127.0.0.1:{listening.getsockname()[1]}"):
                yield served
        finally:
            server.should_exit = True
            thread.join(90)


def test_prompt_is_answered_by_the_server_and_says_so(served: Served, call: Call) -> None:
    app = ScriptedApp(HERE)
    code, out, err = call(app, "--stats", "hello")
    assert (code, out) == (0, "from the server\n")
    assert err.count("attached to the server at http://127.0.0.1:") == 1
    assert app.engines == []
    (asked,) = served.engine.requests
    assert asked.user == "command line"
    assert served.pool is not None and served.pool.loaded()[0].clients == ()


def test_prompt_with_tools_is_reported_as_json(served: Served, call: Call, tmp_path: Path) -> None:
    flags = ("--tools", "read", "--root", tmp_path, "--yes", "--json")
    code, out, err = call(HERE, *flags, "hello")
    assert code == 0, err
    assert json.loads(out)["text"] == "from the server"


def test_second_prompt_finds_the_model_loaded(served: Served, call: Call) -> None:
    for _ in range(2):
        assert call(HERE, "hello").out == "from the server\n"
    assert len(served.opened) == 1


def test_of_several_servers_the_one_that_holds_the_model_is_asked() -> None:
    def client_of(*models: str) -> tuple[ServerClient, tuple[ModelStatus, ...]]:
        loaded = tuple(ModelStatus(Path(path).stem, path, "ready") for path in models)
        return ServerClient(f"http://{len(models)}.test", "token"), loaded

    newest, other = client_of("/m/a.gguf"), client_of("/m/b.gguf", "/m/c.gguf")
    assert choose_server((newest, other), "/m/c.gguf") is other[0]
    assert choose_server((newest, other), "/m/a.gguf") is newest[0]
    assert choose_server((newest, other), "/m/d.gguf") is newest[0]


def test_what_the_user_insists_on_is_loaded_that_way(served: Served, call: Call) -> None:
    call(HERE, "hello")
    call(HERE, "--ctx", "256", "--threads", "1", "hello")
    assert [(one.load.context_tokens, one.load.threads) for one in served.opened] == [
        (None, 0),
        (256, 1),
    ]


def test_the_users_limits_reach_the_server(served: Served, call: Call) -> None:
    call(HERE, "hello")
    limits = ("--vram-gb", "3.5", "--kv-gb", "0.5", "--require-gpu", "--dummy-weights")
    call(HERE, *limits[:4], "hello")
    plain, limited = (one.load for one in served.opened)
    assert (plain.gpu_limit_bytes, plain.kv_limit_bytes) == (None, None)
    assert (limited.gpu_limit_bytes, limited.kv_limit_bytes) == (
        3_500_000_000,
        500_000_000,
    )
    call(HERE, "--dummy-weights", "hello")
    assert served.opened[-1].load.dummy_weights and not limited.dummy_weights
    assert call(HERE, *limits, "hello").code == 4


def test_no_attach_and_a_server_that_is_gone_are_answered_here(
    served: Served, call: Call, paths: Paths
) -> None:
    assert call(HERE, "--no-attach", "hello").out == "from here\n"
    served.opened.clear()
    for file in (paths.state_dir / "servers").iterdir():
        file.unlink()
    register(paths, "http://127.0.0.1:1", "token", 0.0)
    outcome = call(HERE, "hello")
    assert (outcome.out, "attached" in outcome.err) == ("from here\n", False)
    assert served.opened == []


def test_ps_lists_what_is_loaded(served: Served, call: Call) -> None:
    assert "no model is loaded" in call(HERE, "ps").out
    call(HERE, "hello")
    shown = call(HERE, "ps").out
    assert "tiny" in shown and "KV CACHE" in shown
    (record,) = json.loads(call(HERE, "ps", "--json").out)
    assert (record["name"], record["state"], record["clients"]) == ("tiny", "ready", [])
    assert record["server"].startswith("http://127.0.0.1:")


def test_ps_without_a_server_says_so(call: Call, paths: Paths) -> None:
    assert "no server is running" in call(HERE, "ps").err
    assert call(HERE, "ps", "--json").out == "[]\n"


def test_stop_unloads_one_model_or_ends_the_server(served: Served, call: Call) -> None:
    call(HERE, "hello")
    code, out, err = call(HERE, "stop", "tiny")
    assert (code, out) == (0, "") and "unloaded tiny" in err
    assert served.engine.closed
    assert call(HERE, "stop", "tiny").code == 3
    assert not served.stopped.is_set()
    assert "stopped the server" in call(HERE, "stop").err
    assert served.stopped.wait(10)
    assert "no server is running" in call(HERE, "ps").err


def test_stop_of_an_unknown_model_names_the_loaded_ones(served: Served, call: Call) -> None:
    call(HERE, "hello")
    code, _, err = call(HERE, "stop", "nosuch")
    assert code == 3
    assert "nosuch is not loaded" in err and "loaded: tiny" in err
    assert "pull" not in err


def test_stop_reports_a_server_that_does_not_end(
    served: Served, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.cli.serving.stop._TIMEOUT_S", 0.0)
    served.ends = False
    assert "is still finishing" in call(HERE, "stop").err


def test_a_second_server_on_the_same_port_fails_with_one_advice(served: Served, call: Call) -> None:
    call(HERE, "hello")
    (record,) = json.loads(call(HERE, "ps", "--json").out)
    port = record["server"].rpartition(":")[2]
    code, _, err = call(HERE, "serve", "--port", port)
    assert code == 1
    assert f"a server already runs at {record['server']} and has loaded tiny" in err
    assert "another" not in err and f"--port {int(port) + 1}" in err


def test_stop_without_a_server_is_an_error(call: Call, paths: Paths) -> None:
    code, _, err = call(HERE, "stop")
    assert code == 1 and "no server is running" in err


def test_a_second_server_says_what_the_first_holds(
    served: Served, call: Call, paths: Paths
) -> None:
    assert call(HERE, "hello").code == 0
    assert served.pool is not None
    (held,) = served.pool.loaded()
    (notice,) = running_server_notices(paths)
    assert notice.startswith("another server runs at http://127.0.0.1:")
    assert held.name in notice
    assert "localchat stop" in notice


def test_without_another_server_nothing_is_said(paths: Paths) -> None:
    assert list(running_server_notices(paths)) == []


def test_ps_shows_the_part_of_each_gpu(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (GpuPart(15, 5_100_000_000, 24_000_000_000), GpuPart(14, 4_800_000_000))
    status = ModelStatus("big", "/big.gguf", "ready", gpu_parts=parts)
    server = ServerClient("http://127.0.0.1:1", "token")
    monkeypatch.setattr("localchat.cli.attach.running_servers", lambda paths: [(server, (status,))])
    lines = call(HERE, "ps").out.splitlines()
    assert "  big, GPU 0: 15 layers, 5.1 GB of 24.0 GB" in lines
    assert "  big, GPU 1: 14 layers, 4.8 GB" in lines
    (record,) = json.loads(call(HERE, "ps", "--json").out)
    assert record["gpu_parts"][0]["layers"] == 15
