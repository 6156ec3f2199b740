"""Random numbers that depend on what they are for, never on what was drawn before.

An augmentation is a function of (seed, epoch, index), so it is the same with any number of threads or processes,
in any order, and after any resume.
"""

from __future__ import annotations

import numpy as np

# what a stream is for: each purpose has its own numbers
AUGMENT, MIX = range(2)

_WORD = (1 << 64) - 1


def stream(seed: int, epoch: int, index: int, purpose: int = AUGMENT) -> np.random.Generator:
    """Return the generator of one (seed, epoch, index, purpose), each any integer, taken modulo 2^64.

    Philox is a block cipher in counter mode: the seed is its key, the other three are the upper words of its
    256-bit counter. Two tuples of one seed therefore share no number before 2^66 draws, and making a generator
    costs microseconds, since there is no state to warm up (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3").
    """
    counter = np.array((0, index & _WORD, epoch & _WORD, purpose & _WORD), dtype=np.uint64)
    key = np.array((seed & _WORD, 0), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
