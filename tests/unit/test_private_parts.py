"""Private parts of the frameworks are used in two packages only. Each is recorded, and is there as installed."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("jax")

from distlaunch import patches
from distlaunch.base.compat import TESTED, installed
from distlaunch.base.errors import ExitCode, FrameworkError
from distlaunch.cluster.settings import LATENCY_HIDING
from distlaunch.data.seeds import DETERMINISTIC_OPS
from distlaunch.patches.symbols import Symbol, internal, private
from distlaunch.patches.tensorflow_late import not_converted
from distlaunch.strategies import patches as step_patches

PACKAGE = Path(patches.__file__).parents[1]
FOLDERS = (PACKAGE / "patches", PACKAGE / "strategies/patches")
MODULES = sorted(
    f"{package.__name__}.{module.name}"
    for package in (patches, step_patches)
    for module in pkgutil.iter_modules(package.__path__)
    if module.name != "symbols"
)
INTERNALS = ("tensorflow.python", "keras.src", "jax._src")
EXCEPTIONS = {
    # Python's own
    "_exit", "_run_exitfuncs", "_exitfunc", "_getframe", "_replace", "_asdict",
    # distlaunch's own
    "_worded", "_per_example_loss", "_folder", "_modules_folder", "_secrets",
    # exports are opened without strategies; there the parts may be missing, or only spare an operation
    "_outputs_struct", "_inputs_struct", "_build_shapes_dict", "_experimental_lower_tensor_list_ops",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_each_patch_says_what_and_why_and_fits(name: str) -> None:
    patch = importlib.import_module(name).PATCH
    assert patch.symbols
    assert patch.why.endswith(".")
    assert patch.until.endswith(".")
    patch.check()


def test_autograph_knows_functions_that_it_must_not_convert() -> None:
    is_artifact = internal("tensorflow.python.autograph.impl.api.is_autograph_artifact")
    assert is_artifact(not_converted(lambda: None))
    assert not is_artifact(lambda: None)


def test_nothing_outside_the_folder_touches_private_parts() -> None:
    found = [f"{path.relative_to(PACKAGE)}:{line}: {what}" for path, line, what in _private_uses()]
    assert found == []


def _private_uses() -> Iterator[tuple[Path, int, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node):
                if name.startswith(INTERNALS):
                    yield path, getattr(node, "lineno", 0), name
            name = _attribute(node)
            if path.parent not in FOLDERS and _is_private(name) and name not in EXCEPTIONS:
                yield path, getattr(node, "lineno", 0), name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_distlaunch_"))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _attribute(node: ast.AST) -> str:
    """A name behind a dot, or given to getattr and the like; not of `self`."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return "" if own else node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        what = node.args[1]
        if node.func.id in ("getattr", "setattr", "hasattr") and isinstance(what, ast.Constant):
            return str(what.value)
    return ""


def test_the_search_finds_private_parts() -> None:
    """The folder itself is full of them."""
    tree = ast.walk(ast.parse("from keras.src import ops\nx = model._layers\ngetattr(model, '_value')\nself._own"))
    nodes = list(tree)
    assert [name for node in nodes for name in _imported(node)] == ["keras.src.ops"]
    assert [name for node in nodes if (name := _attribute(node))] == ["_layers", "_value"]


KERAS = f"keras {installed('keras')}"
END = (
    "; distlaunch changes or uses this part of keras, so this version cannot be used here; "
    f"install a tested version: pip install 'keras{TESTED['keras']}'"
)
UNFIT: list[tuple[Symbol, str]] = [
    (Symbol("keras.Layer.get_weights", "(self, whole=False)"), "takes (self), expected (self, whole=False)"),
    (Symbol("keras.Layer.set_weights", "(self, ..., all)"), "takes (self, weights), expected (self, ..., all)"),
    (Symbol("keras.Layer.no_such_method", "(self)"), "does not exist"),
    (Symbol("keras.no_such_module.function"), "does not exist"),
    (Symbol("keras.src.no_such_module"), "does not exist"),
    (Symbol("keras.__version__", "()"), "is not a function"),
]  # fmt: skip


@pytest.mark.parametrize(("symbol", "what"), UNFIT)
def test_what_does_not_fit_is_named_with_what_to_do(symbol: Symbol, what: str) -> None:
    with pytest.raises(FrameworkError) as caught:
        symbol.get()
    assert str(caught.value) == f"{KERAS}: {symbol.path} {what}{END}"
    assert caught.value.exit_code == ExitCode.USAGE


def test_others_may_be_around_the_parameters_that_count() -> None:
    for parameters in ("(self, ..., synchronized=False, ...)", "(self, ...)", "(..., epsilon=0.001, ...)"):
        assert callable(Symbol("keras.layers.BatchNormalization.__init__", parameters).get())
    with pytest.raises(FrameworkError):
        Symbol("keras.layers.BatchNormalization.__init__", "(self, ..., epsilon=0.001, axis=-1)").get()


def test_a_symbol_is_what_it_was_before_it_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol: Any = Symbol("keras.src.ops.cond", "(pred, true_fn, false_fn)")
    before = symbol.get()
    monkeypatch.setattr(internal("keras.src.ops"), "cond", lambda other: other)
    assert symbol.get() is before


def test_an_attribute_that_is_gone_is_named_with_the_framework_s_class() -> None:
    import keras

    class Mine(keras.layers.Dense):
        pass

    layer = Mine(1)
    assert private(layer, "_layers") == []
    with pytest.raises(
        FrameworkError, match=rf"^{KERAS}: keras\.src\.layers\.core\.dense\.Dense\._gone does not exist"
    ):
        private(layer, "_gone")
    with pytest.raises(AttributeError):  # not a framework's
        private(object(), "_gone")


OTHER_CLUSTERS = """
class ClusterEnv:
    _cluster_types = []

    @classmethod
    def is_env_present(cls, environ): ...
"""
SCRIPT = """
from distlaunch.patches import jax_clusters
jax_clusters.install()
import jax
print("trained")
"""


def test_a_script_goes_on_where_its_cluster_cannot_be_told_to_jax(tmp_path: Path) -> None:
    """It may give `jax.distributed.initialize()` the arguments itself."""
    clusters = tmp_path / "jax/_src/clusters/__init__.py"
    clusters.parent.mkdir(parents=True)
    clusters.write_text(OTHER_CLUSTERS)
    (tmp_path / "jax/_src/__init__.py").touch()
    (tmp_path / "jax/__init__.py").write_text("from jax._src import clusters\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "trained\n"
    assert "jax._src.clusters.ClusterEnv.is_env_present takes (environ), expected ()" in done.stderr
    assert done.stderr.endswith("; or call jax.distributed.initialize() with arguments\n")


XLA = """
import jax
from distlaunch.strategies.jax.operation_checks import QUICK_ON_CPU
print(jax.jit(lambda x: x + 1, compiler_options=QUICK_ON_CPU)(1))
"""


def test_xla_knows_the_flags_and_options_that_jobs_set() -> None:
    """An unknown flag ends the process, and an unknown option fails the compilation."""
    environ = {**os.environ, "XLA_FLAGS": f"{LATENCY_HIDING} {DETERMINISTIC_OPS}", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", XLA], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
