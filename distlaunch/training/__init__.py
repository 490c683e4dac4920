"""One task's part in a run: the model, its training loop, evaluation and export."""
