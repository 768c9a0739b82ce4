"""Records as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hf_mp.dtypes import spell


def for_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them, with None for inf and NaN, and the names of dtypes."""
    return dict(json.loads(json.dumps(asdict(record), default=spell), parse_constant=lambda constant: None))
