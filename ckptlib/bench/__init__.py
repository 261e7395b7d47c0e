"""How fast things are here: measured side by side, beside a calibration of the same minutes.

``python -m ckptlib.bench`` measures every entry of :mod:`.table` in interleaved rounds
(:mod:`.frame`), prints what came out and records it. A speed belongs to one machine and its
minutes, so two of them are compared within one run only. Nothing fails because it is slow.
"""
