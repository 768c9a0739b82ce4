"""Dataclasses as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hf_mp.dtypes import spell


def for_json(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as values for JSON: inf and NaN as None, dtypes by name."""
    return dict(json.loads(json.dumps(asdict(record), default=spell), parse_constant=lambda constant: None))
