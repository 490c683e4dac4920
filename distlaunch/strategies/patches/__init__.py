"""Changes to Keras that depend on the strategies; see also `distlaunch.patches`."""
