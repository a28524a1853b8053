"""Puts this folder on the path, so that tests can import `reference` and `unit.helpers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
