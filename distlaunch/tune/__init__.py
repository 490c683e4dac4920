"""The candidates of `distlaunch tune`, their measurement and the choice of the fastest."""
