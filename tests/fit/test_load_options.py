"""One record of load options: merged, encoded, and made of the settings."""

import msgspec
import pytest

from localchat.config.settings import Settings
from localchat.engine.options import load_options
from localchat.fit.load_options import LoadOptions


def test_options_go_over_a_base_only_where_they_differ_from_the_defaults() -> None:
    base = LoadOptions(context_tokens=64, threads=3, max_slots=5, require_gpu=True)
    merged = LoadOptions(threads=1, gpu_layers=0).over(base)
    assert merged == msgspec.structs.replace(base, threads=1, gpu_layers=0)
    assert LoadOptions().over(base) == base


def test_options_survive_a_frame() -> None:
    options = LoadOptions(context_tokens=64, gpu_layers="all", kv_limit_bytes=7, quantize="int8")
    body = msgspec.msgpack.encode(options)
    assert msgspec.msgpack.decode(body, type=LoadOptions) == options


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(context_length=9), LoadOptions(context_tokens=9)),
        (Settings(kv_cache_type="q8_0"), LoadOptions(kv_type="q8_0")),
        (Settings(cache_ram_mib=2), LoadOptions(cache_ram_bytes=2 << 20)),
        (Settings(vram_gb=1.5), LoadOptions(gpu_limit_bytes=1_500_000_000)),
        (Settings(kv_gb=0.5), LoadOptions(kv_limit_bytes=500_000_000)),
        (Settings(gpu_layers="all", threads=2), LoadOptions(gpu_layers="all", threads=2)),
        (
            Settings(require_gpu=True, dummy_weights=True, anyway=True),
            LoadOptions(require_gpu=True, dummy_weights=True, anyway=True),
        ),
    ],
)
def test_settings_become_options(settings: Settings, expected: LoadOptions) -> None:
    assert load_options(settings) == expected


def test_every_option_but_slots_and_draft_follows_a_setting() -> None:
    changed = Settings(
        context_length=9,
        kv_cache_type="q8_0",
        cache_ram_mib=2,
        gpus=2,
        gpu_layers=1,
        experts_on_cpu=1,
        require_gpu=True,
        vram_gb=1.0,
        kv_gb=1.0,
        dummy_weights=True,
        quantize="int4",
        anyway=True,
        window_only=True,
        threads=2,
        speculation=False,
        draft="small",
    )
    options, defaults = load_options(changed), LoadOptions()
    same = {
        name
        for name in LoadOptions.__struct_fields__
        if getattr(options, name) == getattr(defaults, name)
    }
    # Names of files are looked up elsewhere; a server asks for more slots, one question for one answer.
    assert same == {
        "max_slots",
        "more_slots",
        "room_for_slots",
        "single_request_tokens",
        "draft",
        "mmproj",
        "lora",
    }
    assert load_options(changed, max_slots=3).max_slots == 3
