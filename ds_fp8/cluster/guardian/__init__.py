"""The guardian: a small process beside every rank that ends the rank when the job cannot go on.

A rank that is stuck in a collective, in a kernel or stopped cannot end itself, and a host without a link cannot be told
to: so every rank has a process beside it, which no GPU, no lock of Python and no collective can block.
Guardians send a line twice a second to the guardian of rank 0, which judges the job: a rank that died, a host that is
not heard of, a job in which nothing moves. They end their ranks when it says so, or when it is not heard of.

The guardian is started by path and imports the standard library alone: it runs in a few MiB and starts in a moment.
Its messages, to its rank and between guardians, are lines of JSON.
"""
