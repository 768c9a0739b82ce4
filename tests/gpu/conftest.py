import sys
from pathlib import Path

# fake_gpu, which is run as a script, too
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
