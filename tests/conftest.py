"""Puts this folder on the path, so that tests can import `reference` and `unit.helpers`, and chooses the Keras."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod's Keras is the one before Keras 3
