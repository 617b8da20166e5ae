"""What a card decides about launches: measured settings stay on the cards that they were measured on."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace

import pytest
import torch
import triton

from localchat_cuda import kernels
from localchat_cuda.kernels import launch
from localchat_cuda.kernels.attention import prefill
from localchat_cuda.kernels.int4 import packed_rows
from localchat_cuda.kernels.int4.tile_config import TileConfig, tile_config_for
from localchat_cuda.kernels.launch import Traits
from tests.support.tiny_engine_core import without_gpu

META = torch.device("meta")


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> list[Traits]:
    found: list[Traits] = []
    monkeypatch.setattr(launch, "_imagined", found)
    return found


def test_safe_mode_leaves_out_pdl_and_kernels_of_one_architecture(imagined: list[Traits]) -> None:
    for safe in (False, True):
        imagined[:] = [Traits.of((9, 0), 132, safe=safe)]
        traits = launch.traits(META)
        assert (traits.pdl, traits.hopper) == (not safe, not safe)
        assert (packed_rows(META) == 512) == safe
        tile = prefill.best_tile_config(128, 64, torch.bfloat16, META)
        assert (tile == prefill.tile_config_for(128)) == safe
        assert traits.fp8, "e4m3 is no risk: it is Triton's own"


def test_safe_mode_is_that_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(launch, "_safe", [])
    launch._traits_of_cuda.cache_clear()
    device = torch.device("cuda", 0)
    for on in (True, False):
        launch.set_safe_mode(on)
        assert launch.traits(device).safe is on
        assert launch.traits(device).pdl is not on
    launch._traits_of_cuda.cache_clear()


@pytest.mark.parametrize(("arch", "wanted"), [(90, 1), (86, 0), (100, 0), (120, 0)])
def test_only_hopper_gets_the_carve_out_that_was_measured_on_it(
    monkeypatch: pytest.MonkeyPatch, arch: int, wanted: int
) -> None:
    set_: list[int] = []
    monkeypatch.setattr(launch, "_prefer_carveout", lambda function, percent: set_.append(percent))
    kernel = SimpleNamespace(
        function=7, metadata=SimpleNamespace(target=SimpleNamespace(arch=arch))
    )
    launch.set_carveout(kernel)
    assert len(set_) == wanted
    launch.set_carveout(kernel, launch.CARVEOUT_ROWS + 1)
    assert len(set_) == wanted


def test_measured_tiles_are_for_the_card_that_they_were_measured_on() -> None:
    measured, other = (tile_config_for("int8", 1, 3584, 3584, sms) for sms in (132, 46))
    assert measured == TileConfig(4, 1, 2, 14, 168)
    assert other != measured and other.fits(3584, 3584)


class _Kernel:
    """Kernel that records the settings of its launches."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names
        self.settings: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(*arguments: object, **settings: object) -> None:
            self.settings = settings

        return launched


@without_gpu
def test_a_launch_states_pdl_and_limits_registers_only_on_a_gpu() -> None:
    hopper, interpreter = launch.Traits.of((9, 0), 132), launch.Traits(False, False, 4)
    kernel = _Kernel("x", "N", "PDL")
    launch.KernelLaunch(kernel, (1,), hopper, 4, 64).run(1, N=2)
    assert kernel.settings == {
        "num_warps": 4,
        "PDL": True,
        "launch_pdl": True,
        "maxnreg": 64,
        "N": 2,
    }
    launch.KernelLaunch(kernel, (1,), interpreter, 4, 64).run(1, N=2)
    assert kernel.settings == {"num_warps": 4, "PDL": False, "N": 2}


@pytest.mark.parametrize("rows", [1, launch.CARVEOUT_ROWS + 1])
def test_a_kernel_of_all_steps_is_compiled_once_per_carveout(rows: int) -> None:
    kernel = _Kernel("x", "ROOMY", "PDL")
    launch.KernelLaunch(kernel, (1,), launch.Traits(False, False, 4), 4, rows=rows).run(1)
    assert kernel.settings["ROOMY"] == launch.own_carveout(rows)


def test_kernels_have_the_carveout_class_before_pdl() -> None:
    modules = [
        import_module(module.name)
        for module in walk_packages(kernels.__path__, "localchat_cuda.kernels.")
    ]
    names = [
        list(kernel.arg_names)
        for module in modules
        for kernel in vars(module).values()
        if "ROOMY" in getattr(kernel, "arg_names", ())
    ]
    assert len(names) > 10
    assert all(arg_names[-2:] == ["ROOMY", "PDL"] for arg_names in names)


def test_no_loop_is_unrolled_over_a_field_of_a_tuple() -> None:
    """Triton 3.6 does not take such a field as a constant, and 3.9, which tests run on, does."""
    kernels = Path(launch.__file__).parent
    found = [
        f"{path.relative_to(kernels)}: {line.strip()}"
        for path in sorted(kernels.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"static_range\([^)]*\w\.[a-z]", line)
    ]
    assert not found


class _Compiled:
    """What Triton returns for a launch, and its launcher."""

    function = 7
    packed_metadata = ("metadata",)

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.launches.append(arguments)


class _JitKernel:
    """Counts the launches through Triton. `shape`, N and PDL are constants."""

    arg_names = ("x", "n", "shape", "N", "PDL")
    constexprs = (2, 3, 4)

    def __init__(self) -> None:
        self.compiled: list[_Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        def launched(*arguments: object, **settings: object) -> _Compiled:
            self.compiled.append(_Compiled())
            return self.compiled[-1]

        return launched


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 99


@pytest.fixture
def jit_kernel(monkeypatch: pytest.MonkeyPatch) -> _JitKernel:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_imagined", [])
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    return _JitKernel()


def test_a_second_launch_goes_to_the_loaded_kernel_with_addresses(jit_kernel: _JitKernel) -> None:
    x = torch.zeros(64)
    for _ in range(3):
        launch.launch_kernel(jit_kernel, (5,), x, 3, (1, 2), N=4, PDL=False, num_warps=2)
    (compiled,) = jit_kernel.compiled
    arguments = (5, 1, 1, 99, 7, ("metadata",), None, None, None, x.data_ptr(), 3, (1, 2), 4, False)
    assert compiled.launches == [arguments, arguments]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"x": torch.zeros(65)[1:]},
        {"n": 1},
        {"n": 16},
        {"n": 1 << 40},
        {"n": None},
        {"shape": (1, 3)},
        {"N": 5},
        {"num_warps": 4},
    ],
    ids=str,
)
def test_what_triton_compiles_apart_is_launched_apart(
    jit_kernel: _JitKernel, change: dict[str, object]
) -> None:
    common: dict[str, object] = {"x": torch.zeros(64), "n": 3, "shape": (1, 2), "N": 4}
    for values in (common, {**common, **change}):
        rest = dict(values)
        arguments = [rest.pop(name) for name in ("x", "n", "shape")]
        launch.launch_kernel(jit_kernel, (1,), *arguments, PDL=False, **rest)
    assert len(jit_kernel.compiled) == 2


def test_arguments_of_other_kinds_are_left_to_triton(jit_kernel: _JitKernel) -> None:
    for _ in range(2):
        launch.launch_kernel(jit_kernel, (1,), "text", 3, (), N=4, PDL=False)
    assert len(jit_kernel.compiled) == 2


def test_constants_are_the_last_parameters_of_every_kernel() -> None:
    """A launch takes all arguments from the first constant on as constants."""
    count = 0
    for module in walk_packages(kernels.__path__, "localchat_cuda.kernels."):
        for name, kernel in vars(import_module(module.name)).items():
            if not name.endswith("_kernel") or not hasattr(kernel, "fn"):
                continue
            count += 1
            parameters = inspect.signature(kernel.fn).parameters.values()
            constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]
            assert constant == sorted(constant), name
    assert count > 50
