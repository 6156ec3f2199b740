"""One process of a run that `vitrail train --nproc N` has started: it trains, and the main process writes the report.

Trackers are open only as long as the run trains, so the process that started this one could not send them the report.
"""

from __future__ import annotations

import sys


def main(config: str, note: str, resume: str, asked: str) -> int:
    """See `vitrail.training.processes.main`."""
    from vitrail.training import processes  # which imports torch
    from vitrail.verbs.train.train import reported

    return processes.main(config, note, resume, asked, report=reported)


if __name__ == "__main__":
    from vitrail.training.processes import end_with_parent
    from vitrail.world import leave

    end_with_parent()
    leave(main(*sys.argv[1:]))
