"""Puts scripts/tools/guide on the path: its scripts import each other by their plain names."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "tools" / "guide"
sys.path.insert(0, str(SCRIPTS))
