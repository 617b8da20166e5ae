"""Shared by tests: ROOT."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
