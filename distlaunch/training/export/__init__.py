"""Export of trained models to SavedModel, TFLite, Keras and weights files."""
