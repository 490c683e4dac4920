"""distlaunch: train any Keras 3 model under any distribution strategy, from one YAML file."""

__version__ = "0.2.0"
