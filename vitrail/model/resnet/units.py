"""Units in each stage of the published ResNets. Torch-free."""

HYBRIDS: dict[tuple[str, int], tuple[int, ...]] = {
    ("R50", 32): (3, 4, 6, 3),
    ("R50", 16): (3, 4, 9),
    ("R26", 32): (2, 2, 2, 2),
    ("R26", 16): (2, 2, 4),
}
"""Hybrids, by name and ratio. /16 moves stage 4's units into stage 3 (paper, section 4.1, option ii)."""

BIT_UNITS: dict[int, tuple[int, ...]] = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""BiT, by depth."""
