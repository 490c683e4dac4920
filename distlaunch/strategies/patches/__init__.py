"""Changes to Keras that need to know the strategies: the other part of `distlaunch.patches`."""
