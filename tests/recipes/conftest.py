import sys
from pathlib import Path

# the recipes are run as files and import each other by bare name
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
