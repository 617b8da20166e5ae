"""For every test: a home of its own, no network, and the checkout's code in subprocesses too."""

import atexit
import gc
import os
import re
import signal
import socket
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.paths import ROOT

# Imports and collected tests are a million permanent objects. A full garbage collection traverses them in about
# a second, so there is none until they are frozen (`pytest_collection_finish`).
gc.disable()

# Read once, when Triton is first imported, whichever test does so: kernels run in its interpreter on a CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine must not fail a test: no example has a deadline.
settings.register_profile("localchat", deadline=None)
settings.load_profile("localchat")

TIERS = {
    "gpu": (
        *("localchat_cuda/test_compile_ahead_gpu.py", "localchat_cuda/test_model_gpu.py"),
        "localchat_cuda/test_model_w8_gpu.py",
    ),
    "interpreter": (
        *("localchat_cuda/kernels", "localchat_cuda/runner", "localchat_cuda/weights"),
        *("localchat_cuda/test_architectures.py", "localchat_cuda/test_compile_ahead.py"),
        *("localchat_cuda/test_families.py", "localchat_cuda/test_family_formats.py"),
        *("localchat_cuda/test_guide.py", "localchat_cuda/test_guide_w8.py"),
        "localchat_cuda/test_bounded_head.py",
        "localchat_cuda/test_kv_fp8_model.py",
        "localchat_cuda/test_large_residual.py",
        *("localchat_cuda/ranks", "localchat_cuda/test_drafts.py"),
        *("localchat_cuda/test_family_modules.py", "localchat_cuda/plan/test_window_plan.py"),
        *("localchat_cuda/test_gguf.py", "localchat_cuda/test_gguf_models.py"),
        "localchat_cuda/test_gguf_hybrids.py",
        *("localchat_cuda/test_hybrids.py", "localchat_cuda/test_latent.py"),
        *("localchat_cuda/test_load_drafts.py", "localchat_cuda/test_random_configs.py"),
        "localchat_cuda/test_windows.py",
    ),
    "real": ("real",),
    "process": (
        *(
            "contract",
            "engine/local",
            "localchat_llamacpp",
            "test_imports.py",
            "test_gc_control.py",
        ),
        *("chat_format/test_render_process.py", "chat_format/test_template.py"),
        *("chat_format/test_chat_format.py", "chat_format/test_template_messages.py"),
        *(
            "cli/measure/test_bench.py",
            "cli/chat/test_interrupted_conversation.py",
            "cli/test_process.py",
        ),
        "cli/test_signals.py",
        *(
            "fit/test_speed.py",
            "history/test_autosave.py",
            "models/hub/test_pull_command.py",
        ),
        *("server/anthropic/test_prompt_cache.py", "server/llamacpp/test_infill_guide.py"),
        *("server/test_chained_servers.py", "server/test_engine_death.py", "server/test_serve.py"),
        "server/test_keys_and_kept_kv.py",
        *("cli/test_attach.py", "cli/chat/test_choose_model.py"),
        "cli/chat/test_screen_reader.py",
        *("server/openai_responses/test_mcp.py", "tools/test_mcp.py", "tools/test_red_team.py"),
        *("tui/test_program.py", "tui/test_terminal_bytes.py"),
    ),
    "slow": (
        *(
            "guide",
            "engine/local/test_kept_kv.py",
            "models/hub/test_killed_download.py",
            "server/test_fuzz.py",
            "server/test_soak.py",
        ),
        *("backend_api/sampling", "core/test_engine_core_determinism.py"),
        *("core/structured_output", "localchat_cuda/test_backend.py"),
        *("localchat_cuda/config/test_reader.py", "localchat_cuda/config/test_rope.py"),
        *("core/kv_cache/test_properties.py", "models/test_assess.py", "models/test_fit_golden.py"),
        *("core/spec_decode/test_draft_cost.py", "core/spec_decode/test_draft_model.py"),
        *("core/test_block_disk_tier.py", "core/test_disk_tier.py"),
        *("kv_store/test_entry.py", "kv_store/test_store.py"),
        *(
            "cli/models/test_fit.py",
            "cli/models/test_quantize.py",
            "engine/remote/test_remote_failures.py",
        ),
        *("measure/test_quality_of_guide.py", "measure/test_sweep.py"),
        *("cli/measure/test_plan.py", "cli/serving/test_batch.py"),
        *("server/openai/test_strict_types.py", "session/test_command_runner.py"),
        *(
            "cli/test_killed.py",
            "cli/test_onboarding.py",
            "models/test_onboarding.py",
            "server/test_lifecycle.py",
            "server/test_local_api.py",
            "tui",
        ),
    ),
}
"""Markers by folder or file under tests/: what scripts/test-fast leaves out, without importing it."""

_SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
_LOOPBACK = re.compile(r"127\.|::1$|localhost$|::ffff:127\.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out every tier")
    parser.addoption(
        "--record-kernels", action="store_true", help="record kernels that are compiled"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--fast") and tiers_of(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for tier in tiers_of(item.path):
            item.add_marker(tier)
    if config.getoption("--fast"):
        # Files of a tier are not collected at all. Others have single tests with its marker.
        slow = [item for item in items if any(mark.name in TIERS for mark in item.iter_markers())]
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish() -> None:
    """Collect once what the last tests left, because pytest then traverses all objects five times."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else nanobind reports what is left at the exit


@cache
def tiers_of(path: Path) -> list[str]:
    """Markers of a test file or folder."""
    place = path.relative_to(Path(__file__).parent)
    names = {str(place), *map(str, place.parents)}
    return [tier for tier, places in TIERS.items() if names & set(places)]


@pytest.fixture(scope="session", autouse=True)
def _plain_signals() -> Iterator[None]:
    """Programs that tests start hear every signal, also where the tests themselves were started in the
    background of a script or under nohup: what is ignored there is inherited."""
    ignored = [number for number in _SENT if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        plain = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, plain)
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of folders that do not exist yet.

    `mktemp` lists its whole folder at each call, which takes longer with every test.
    """
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def _own_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, models and state of the person who runs the tests are neither read nor written.

    LOCALCHAT_LLAMACPP_LIBRARY stays: it names the library that the whole run is about.
    """
    home = next(_homes)
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("LOCALCHAT_", "XDG_", "HF_"))]:
        if name != "LOCALCHAT_LLAMACPP_LIBRARY":
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for part in ("config", "data", "state", "cache"):
        monkeypatch.setenv(f"XDG_{part.upper()}_HOME", str(home / part))


@pytest.fixture
def one_thread(_own_home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test starts compute with one thread.

    Threads wait for each other in busy loops. With two of them per program, and a test process more than there
    are cores, an answer takes twice the processor time.
    """
    monkeypatch.setenv("LOCALCHAT_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that leaves this machine fails at once, and says so."""
    for verb in ("connect", "connect_ex"):
        allowed = getattr(socket.socket, verb)

        def refuse(self: socket.socket, address: Any, allowed: Any = allowed) -> Any:
            inside = self.family == socket.AF_UNIX or _LOOPBACK.match(str(address[0]))
            assert inside, f"a test wants the network: {address}"
            return allowed(self, address)

        monkeypatch.setattr(socket.socket, verb, refuse)


@pytest.fixture(autouse=True)
def _quiet_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs count as undisturbed, however busy the machine that runs the tests is."""
    monkeypatch.setattr("localchat.fit.contention._waiting_share", lambda root: 0.0)


@pytest.fixture(scope="session", autouse=True)
def _checkout(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Subprocesses import this checkout; where the distribution is not installed, its entry points are
    still found."""
    places = [ROOT, ROOT / "backends"]
    patch = pytest.MonkeyPatch()
    if not entry_points(group="localchat.backends"):
        places.append(_described(tmp_path_factory.mktemp("dist")))
        patch.syspath_prepend(str(places[-1]))
    before = os.environ.get("PYTHONPATH")
    parts = [*map(str, places), *([before] if before else [])]
    patch.setenv("PYTHONPATH", os.pathsep.join(parts))
    patch.delenv(
        "PYTHONDONTWRITEBYTECODE", raising=False
    )  # hundreds of them would compile it all again
    yield
    patch.undo()


def _described(folder: Path) -> Path:
    """A folder with the metadata that an installation would have written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / f"{project['name'].replace('-', '_')}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
