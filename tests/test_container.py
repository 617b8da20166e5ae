"""The container file: its commands, paths and ports are those of the program. No image is built."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from localchat.cli.serving import serve
from localchat.config.paths import find_paths
from localchat.server.app import ROUTES
from tests.support.paths import ROOT

FILE = ROOT / "scripts/container/Containerfile"
FINAL = ("cpu", "cuda")


class Stage(NamedTuple):
    base: str
    lines: list[tuple[str, str]]

    def only(self, instruction: str) -> str:
        (found,) = [text for name, text in self.lines if name == instruction]
        return found

    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in shlex.split(self.only("ENV")))


def stages() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, Stage] = {}
    lines: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            lines = []
            found[stage] = Stage(base, lines)
        else:
            lines.append((name, rest.strip()))
    return found


def test_without_a_target_the_image_is_the_one_for_any_cpu() -> None:
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("name", ["cpu-build", "cuda-build"])
def test_a_build_gets_every_file_that_the_distribution_needs(name: str) -> None:
    copied: set[str] = set()
    for instruction, text in stages()[name].lines:
        if instruction == "COPY":
            *sources, target = text.split()
            copied.update(sources)
            assert all((ROOT / source).exists() for source in sources)
            assert target in ("/src/", *(f"/src/{source}" for source in sources))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {Path(package).parts[0] for package in wheel["packages"]}
    table = project["project"]
    needed = {"pyproject.toml", table["readme"], *table["license-files"], *wheel["force-include"]}
    assert needed | packages == copied


@pytest.mark.parametrize("name", ["cpu-build", "cuda-build"])
def test_a_build_asks_for_extras_that_exist(name: str) -> None:
    installs = [text for instruction, text in stages()[name].lines if "pip install" in text]
    (extras,) = [re.findall(r"/src\[([\w,]+)\]", text) for text in installs]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {extra for each in extras for extra in each.split(",")}
    assert asked <= set(project["optional-dependencies"])
    assert ("cuda" in asked) == (name == "cuda-build")


@pytest.mark.parametrize("name", FINAL)
def test_a_container_serves_on_the_port_that_it_exposes(name: str) -> None:
    stage = stages()[name]
    assert json.loads(stage.only("ENTRYPOINT")) == ["localchat"]
    command = json.loads(stage.only("CMD"))
    assert command[0] == "serve"
    # As under the program's own group: click keeps the help option that it makes first.
    context: click.Context = serve.command.make_context(
        "serve", command[1:], help_option_names=["-h", "--help"]
    )
    assert context.params["host"] == "0.0.0.0"
    assert stage.only("EXPOSE") == str(context.params["port"])


@pytest.mark.parametrize("name", FINAL)
def test_health_is_asked_by_the_servers_own_route(name: str) -> None:
    health = stages()[name].only("HEALTHCHECK")
    port, path = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", health)[0]
    assert port == stages()[name].only("EXPOSE")
    assert path in {route.path for route in ROUTES}
    compile(json.loads(health.partition("CMD ")[2])[2], "healthcheck", "exec")


@pytest.mark.parametrize("name", FINAL)
def test_nobody_is_root_and_everything_written_is_in_the_volume(name: str) -> None:
    stage = stages()[name]
    volume = stage.only("VOLUME")
    assert stage.only("USER") == "localchat"
    assert f"--home-dir {volume} localchat" in stage.only("RUN")
    paths = find_paths(stage.environment())
    written = (paths.settings_file, paths.data_dir, paths.state_dir, paths.cache_dir)
    assert all(place.is_relative_to(volume) for place in (*written, paths.models_dir))


@pytest.mark.parametrize("name", FINAL)
def test_the_environment_is_copied_to_where_it_was_built(name: str) -> None:
    built = stages()[f"{name}-build"]
    (place,) = {word for _, text in built.lines for word in re.findall(r"/opt/\w+", text)}
    assert stages()[name].only("COPY") == f"--from={name}-build {place} {place}"
    assert stages()[name].environment()["PATH"] == f"{place}/bin:$PATH"
    assert stages()[name].base.rpartition("-")[2] == built.base.rpartition("-")[2]
