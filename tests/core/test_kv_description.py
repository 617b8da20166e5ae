"""The description under which KV is kept on the disk: other KV, or another layout of it, has another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localchat.core.process import OpenedModel, _kv_description


def _description(path: Path, **changes: Any) -> str:
    plan = {"flash_attention": False, "window_only": False, "gpu_layers": 0}
    plan |= {name: value for name, value in changes.items() if name in plan}
    opened = SimpleNamespace(
        fingerprint="f16",
        model=SimpleNamespace(info=SimpleNamespace(identity="a model")),
        build=changes.get("build", "a build"),
        choice=SimpleNamespace(
            backend=SimpleNamespace(name="llama.cpp"),
            availability=SimpleNamespace(versions=(("llama.cpp", "1"),)),
        ),
        safe_mode=changes.get("safe_mode", False),
        plan=SimpleNamespace(**plan),
        path=path,
    )
    return _kv_description(cast(OpenedModel, opened))


@pytest.mark.parametrize(
    "change",
    [
        {"flash_attention": True},  # values lie in another order
        {"window_only": True},
        {"gpu_layers": 1},
        {"build": "another build"},
        {"safe_mode": True},
    ],
)
def test_another_layout_or_build_has_another_description(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert _description(path) == _description(path)
    assert _description(path, **change) != _description(path)


def test_a_changed_model_file_has_another_description(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    before = _description(path)
    path.write_bytes(b"other weights")
    assert _description(path) != before
