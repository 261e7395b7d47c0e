"""The one executor of the notebooks, for make, tests and CI; it never measures anything itself.

``python -m ckptlib.reproduce`` runs the notebooks in order, with the parameters of a profile, and
leaves out what is up to date. The modules are the steps: :mod:`.parameters` checks what goes in,
:mod:`.stamps` says what may be skipped and why not, :mod:`.kernel` runs one notebook,
:mod:`.__main__` puts them in a row.
"""
