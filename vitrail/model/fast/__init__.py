"""Everything that is there for speed alone: without this folder networks compute the same, by their definitions."""
