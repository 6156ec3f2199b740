"""`python -m vitrail` is the command `vitrail`."""

import os
import sys

from vitrail.cli import main

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "torch" in sys.modules:
        from vitrail.world import leave

        leave(code)
    sys.exit(code)
