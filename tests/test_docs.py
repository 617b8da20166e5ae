"""Statements of the README and docs/ that a change elsewhere would make false."""

import re
from pathlib import Path

import pytest

from localchat.server.app import ROUTES
from localchat.server.ollama.endpoints import unsupported
from localchat.server.paths import normalize_path
from scripts.tools import cli_reference
from tests.support.paths import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
OTHER_PROGRAMS = re.compile(
    r"\b(aider|docker|journalctl|pip|podman|pytest|ray|systemctl|uv|uvx|vLLM|vllm)\b"
)
"""Lines about these programs have flags that are not ours."""


def anchors(document: Path) -> set[str]:
    """Return the anchors that a Markdown viewer gives the headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_a_file_and_to_one_of_its_headings(document: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_flags_in_the_documents_are_flags_of_a_verb() -> None:
    flags = set(re.findall(r"--[a-z][\w-]*", cli_reference.reference()))
    unknown = []
    for document in DOCUMENTS:
        for line in document.read_text(encoding="utf-8").splitlines():
            if OTHER_PROGRAMS.search(line) is None:
                named = re.findall(r"(?<![\w-])--[a-z][\w-]*", line)
                unknown += [(document.name, flag) for flag in named if flag not in flags]
    assert not unknown


def test_the_table_of_routes_has_every_route_of_the_server() -> None:
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    table = serving.partition("## Routes")[2].partition("\n\nAll routes")[0]
    cells = re.findall(r"^\| (`/.*?) \|", table, re.MULTILINE)
    listed = {normalize_path(path) for cell in cells for path in re.findall(r"`(/[^`]*)`", cell)}
    served = {
        re.sub(r"\{id:path\}", "NAME", route.path)
        for route in ROUTES
        if route.endpoint is not unsupported
    }
    assert listed == served - {"/"}
