"""How a machine dies and what must be left afterwards; nothing here is used by a training job.

``kill`` delivers a real SIGKILL to a child process at a chosen file operation; ``oracle`` judges
what a store gives back after that, or after any other crash.
"""
