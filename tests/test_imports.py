"""Imports that are allowed at start-up: start-up is the first thing a user feels."""

import subprocess
import sys

import PIL.Image
import pytest

from tests.support.media import encoded

HEAVY = {
    *(
        "torch",
        "triton",
        "llama_cpp",
        "xllamacpp",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
    ),
    *("numpy", "textual", "rich", "msgspec", "jinja2", "gguf", "psutil", "tomlkit", "platformdirs"),
    *("PIL", "soundfile", "cffi"),
    *("asyncio", "importlib.metadata", "http", "ssl", "localchat_llamacpp", "localchat_cuda"),
    *("localchat.core", "localchat.chat_format", "localchat.engine", "localchat.config.settings"),
}


def modules_after(code: str) -> set[str]:
    """Every module that this code has loaded at its end, by full name."""
    script = f"import sys\n{code}\nprint('\\n'.join(['', 'LOADED', *sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split("\nLOADED\n")[1].split())


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import localchat", id="package"),
        pytest.param("from localchat.cli.main import run; run(['--help'])", id="help"),
        pytest.param("from localchat.cli.main import run; run(['--version'])", id="version"),
        pytest.param("from localchat.cli.main import run; run(['run', '--help'])", id="verb-help"),
        *(
            pytest.param(f"from localchat.cli.main import run; run(['{verb}', '--help'])", id=verb)
            for verb in ("list", "show", "cp", "rm", "import", "fit", "history", "bench", "batch")
        ),
        pytest.param("from localchat.cli.main import run; run(['dcotor'])", id="usage-error"),
    ],
)
def test_nothing_heavy_is_loaded_before_a_prompt(code: str) -> None:
    assert modules_after(code) & HEAVY == set()


def test_a_picture_loads_the_decoders_of_its_formats_alone() -> None:
    """Pillow has forty formats, and each is code that reads hostile files."""
    data = encoded(PIL.Image.new("L", (2, 2)), "TIFF")
    code = f"from localchat.media.decode import decode_image\ndecode_image({data!r})"
    plugins = {name for name in modules_after(code) if name.endswith("ImagePlugin")}
    names = ("Bmp", "Gif", "Jpeg", "Png", "Ppm", "Tiff", "WebP")
    assert plugins == {f"PIL.{name}ImagePlugin" for name in names}


@pytest.mark.parametrize(
    "package",
    [
        "localchat.engine.request",
        "localchat.cli.chat.ask",
        "localchat.cli.chat.one_shot",
        "localchat.config.settings_file",
    ],
)
def test_what_a_prompt_needs_reaches_neither_the_child_nor_a_backend(package: str) -> None:
    loaded = modules_after(f"import {package}")
    forbidden = {
        "numpy",
        "rich",
        "textual",
        "torch",
        "llama_cpp",
        "xllamacpp",
        "jinja2",
        "PIL",
        "soundfile",
        "localchat.core",
        "localchat.tools",
        "acp",
        "mcp",
        "sqlite3",
    }
    assert loaded & {*forbidden, "localchat.chat_format", "localchat_llamacpp"} == set()


def test_finding_backends_loads_no_native_library() -> None:
    loaded = modules_after(
        "from localchat.backend_api.registry import find_backends; find_backends()"
    )
    assert loaded & {"torch", "triton", "llama_cpp", "xllamacpp", "numpy"} == set()


def test_planning_a_load_on_a_gpu_knows_every_family_without_torch() -> None:
    loaded = modules_after("import localchat_cuda.config.reader, localchat_cuda.plan.memory_plan")
    assert {f"localchat_cuda.architectures.{name}" for name in ("llama", "gemma4")} <= loaded
    assert loaded & {"torch", "triton", "numpy"} == set()


@pytest.mark.parametrize("verb", ["list", "show guide", "fit guide"])
def test_looking_at_models_loads_no_native_library(verb: str) -> None:
    loaded = modules_after(f"from localchat.cli.main import run; assert run({verb.split()}) == 0")
    heavy = {"torch", "triton", "llama_cpp", "xllamacpp", "numpy", "huggingface_hub", "rich"}
    # `fit` measures the memory bandwidth with numpy.
    allowed = {"numpy"} if verb.startswith("fit") else set()
    assert loaded & (heavy - allowed) == set()


@pytest.mark.parametrize(
    "module",
    [
        "localchat.cli.chat.ask",
        "localchat.cli.serving.serve",
        "localchat.server.app",
        "localchat.session.session",
        "localchat.tui.app",
    ],
)
def test_tools_are_imported_only_once_they_are_on(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert [name for name in loaded if f"{name}.".startswith(("mcp.", "localchat.tools."))] == []


_FIRST_FRAME = """
import localchat.cli.chat.ask as ask, localchat.tui.launch as launch
from textual.app import App
from localchat.cli.main import run
from localchat.tui.app import ChatApp

async def leave(app): app.exit(0)

ask._is_interactive = lambda: True
launch.can_show = lambda environ: True
ChatApp._after_first_frame = leave
ChatApp.run = lambda app: App.run(app, headless=True, size=(120, 40))
assert run(['--no-attach']) == 0
"""


def test_the_first_frame_waits_for_nothing_that_only_an_answer_needs() -> None:
    loaded = modules_after(_FIRST_FRAME)
    assert "localchat.tui.screens.chat" in loaded
    forbidden = {
        *(
            "llguidance",
            "PIL",
            "soundfile",
            "starlette",
            "uvicorn",
            "httpx",
            "http.client",
            "numpy",
            "torch",
            "llama_cpp",
            "xllamacpp",
        ),
        *("pygments", "markdown_it", "huggingface_hub", "prometheus_client", "psutil", "gguf"),
        *(
            "jinja2",
            "sqlite3",
            "tomlkit",
            "filelock",
            "localchat.core",
            "localchat.engine.local.engine",
        ),
        *("localchat.history", "localchat.models.catalog", "localchat.models.external.discovery"),
        *("localchat.tools", "mcp", "pydantic"),
        *(
            "localchat.model_files.checkpoint",
            "localchat.session.command_runner",
            "localchat_llamacpp",
        ),
        *(
            "localchat.tui.transcript",
            "localchat.tui.widgets.metrics_panel",
            "localchat.pool.entry",
        ),
        *(
            "localchat.chat.overflow",
            "localchat.session.answer_builder",
            "localchat.engine.attached",
            "localchat.documents.library",
        ),
    }
    assert loaded & forbidden == set()
