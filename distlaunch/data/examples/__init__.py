"""Reading and mapping of single examples, and handling of failures."""
