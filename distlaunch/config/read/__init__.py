"""Reading of configs: YAML with line numbers, overrides, variables, and error messages."""
