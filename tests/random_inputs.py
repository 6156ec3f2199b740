"""How many random inputs a test draws: few by default, because each run of the tests draws others."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("VITRAIL_TEST_EXAMPLES", "10"))
"""Number of random inputs for each test that draws them. VITRAIL_TEST_EXAMPLES sets it."""
MANY = "VITRAIL_TEST_EXAMPLES" in os.environ
"""Whether somebody asked for a long search, in which every case of a table is tried."""
QUIETLY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
