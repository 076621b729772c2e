"""Recipes are scripts: their folder is where they find each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
