"""The guide's scripts import each other by their plain names, as `python scripts/tools/guide/train.py`
does.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "tools" / "guide"
sys.path.insert(0, str(SCRIPTS))
