"""Every place where distlaunch changes Keras, TensorFlow or JAX, or reaches into their private parts.

No other module of a task does either (`tests/unit/test_private_parts.py` checks it), so an upgrade of a framework
concerns this folder alone, and `distlaunch.strategies.patches`, whose modules change how a step is computed and so need
to know the strategies. Each module has a record, a `Patch`: the symbols it depends on with their parameters, why,
and what would make the patch needless. The symbols are checked before they are used. If one does not fit the installed
version, the run is refused with its name, what was found and what was expected. `distlaunch.base.compat` has the tested
versions.

The modules called `FRAMEWORK_private` hold functions around private parts that are only used, not changed.
"""
