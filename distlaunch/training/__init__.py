"""The part of one task in a run: the model, its training loop, evaluation and export."""
