"""Exit codes of a run: they say whether starting it again helps."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""A rank raised an exception: the same command would most likely fail again."""
EXIT_USER_ERROR = 2
"""A mistake in a configuration, a path or a hostfile: the message says what to change."""
EXIT_LOST = 75
"""A rank, a host or a link was lost, or nothing moved for train.timeout: the same command resumes (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 143
"""Asked to stop (128 + SIGTERM): a checkpoint is saved, and the same command resumes."""
