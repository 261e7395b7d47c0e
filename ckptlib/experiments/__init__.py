"""One module an experiment, with the engine that runs them; nothing here draws or judges a result.

``registry`` names every output and its columns, ``context`` checks the parameters of a notebook and
gives it a :class:`~ckptlib.experiments.context.Run`, ``engine`` runs the trials.
"""
