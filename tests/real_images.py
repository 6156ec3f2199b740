"""Where the real images are that some tests use."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(os.environ.get("VITRAIL_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
