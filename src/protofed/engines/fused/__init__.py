"""Several runs in one process, whose clients are trained and tested together as if they were those of one."""
