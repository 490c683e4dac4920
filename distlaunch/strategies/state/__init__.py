"""State of a model between processes and files: in pieces, checked, with bounded memory."""
