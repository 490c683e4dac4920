"""The agent: one process on each host of a job, started by the controller and ended with the connection to it."""
