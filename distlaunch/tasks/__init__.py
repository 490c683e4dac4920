"""The programs that run as tasks, and those that run beside them."""
