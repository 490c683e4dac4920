"""distlaunch: train any Keras 3 model with any way there is to distribute it, from one YAML file."""

__version__ = "0.2.0"
