"""Places where distlaunch changes Keras, TensorFlow or JAX, or uses their private parts.

The package `distlaunch.strategies.patches` contains the changes to the computation of a step, which depend on the
strategies. No other module of a task makes changes or uses private parts (`tests/unit/test_private_parts.py` checks
this), so an upgrade of a framework concerns only these two packages.

Each module has a record, a `Patch`: the symbols it depends on with their parameters, the reason, and what would make
the patch unnecessary. The symbols are checked before they are used. If one does not fit the installed version, the run
is refused with the symbol's name, what was found and what was expected. `distlaunch.base.compat` lists the tested
versions.

The modules called `FRAMEWORK_private` contain functions for private parts that are only used, not changed.
"""
