"""Single examples: where they come from, how they are read and mapped, and what happens if that fails."""
