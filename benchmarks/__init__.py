"""Side-by-side measurements against peers: `python -m benchmarks.NAME [--quick]`.

Ours and the peer's take turns in one run, every round gives one ratio, and what is reported is the median and the
spread of the ratios, with the machine, its ceiling and the load of other processes beside them.
"""
