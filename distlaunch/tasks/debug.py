"""`python -m distlaunch.tasks.debug CONFIG`: trains in this process, on one device, without graphs, with the terminal.

`distlaunch train --debug` becomes this process, so that a debugger has its input, its output and Ctrl-C.
"""

from __future__ import annotations

import _thread
import argparse
import bdb
import contextlib
import os
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from distlaunch.base.code_origins import format_exception
from distlaunch.base.errors import ConfigError, DistlaunchError, ExitCode, Problem
from distlaunch.base.run_dir import RunDir
from distlaunch.base.user_modules import begin_program
from distlaunch.cluster.machine import Machine
from distlaunch.config.backend import choose_backend
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.load import LoadedConfig, load_config
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.references.modules import program_of
from distlaunch.config.run import RunConfig
from distlaunch.notebook import train_here
from distlaunch.tasks.no_terminal import asks_in_terminal
from distlaunch.tasks.process_end import end_process

_STDERR = 2  # file descriptor


def main() -> None:
    end_process(_main())


def _main() -> int:
    arguments = _parse()
    try:
        loaded = load_config(Path(arguments.target), tuple(arguments.overrides), num_gpus=len(Machine.here().gpus))
        loaded.config.check_name(arguments.name)
        return _debug(loaded, arguments.name or loaded.config.name or "")
    except (KeyboardInterrupt, bdb.BdbQuit):  # Ctrl-C, or `q` at a prompt
        print("interrupted", file=sys.stderr)
        return ExitCode.PREEMPTED
    except DistlaunchError as error:
        print(f"error: {error}" if "\n" not in str(error) else error, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the user's code may raise anything
        print(format_exception(error), end="", file=sys.stderr)
        return ExitCode.FAILED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.tasks.debug", description=__doc__)
    parser.add_argument("target", metavar="CONFIG")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name")
    return parser.parse_args()


def _debug(loaded: LoadedConfig, name: str) -> ExitCode:
    config, warnings = with_argument_paths(loaded.config)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    config = debug_config(config)
    choose_backend(config.strategy.backend)
    begin_program(program_of(config))
    _run_eagerly(tensorflow=config.strategy.runs_tensorflow)
    run = RunDir.claim(config.runs_dir, f"{name}-debug")
    print(f"debugging {run.path}: one device, without graphs and without export", flush=True)
    try:
        with run.lock():
            train_here(config, run, _never_stop())
    except ConfigError as error:
        raise ConfigError(
            [Problem(p.key, p.message, p.source or loaded.source(p.key)) for p in error.problems]
        ) from None
    print(f"done: {run.path}", flush=True)
    return ExitCode.DONE


def debug_config(config: RunConfig) -> RunConfig:
    """Return the config of the same training, at the same global batch, on one device and in one process."""
    return config.model_copy(
        update={
            "strategy": config.strategy.on_one_device(),
            "cluster": Cluster(),
            "data": config.data.model_copy(update={"processes": None}),
            "train": config.train.model_copy(update={"steps_per_call": 1}),
            "compile": config.compile and config.compile.model_copy(update={"jit_compile": False}),
            "resume": "never",
            "export": [],  # exports need graphs
        }
    )


def _run_eagerly(*, tensorflow: bool) -> None:
    from distlaunch.patches.tensorflow_late import tf, when_imported

    def run_tensorflow_eagerly() -> None:
        from distlaunch.patches.tensorflow_autograph import keep_in_memory

        tf.config.run_functions_eagerly(True)
        # otherwise `data.map` would still be traced, since eager mode does not affect tf.data
        tf.data.experimental.enable_debug_mode()
        keep_in_memory()

    when_imported(run_tensorflow_eagerly)
    if not tensorflow:
        import jax

        jax.config.update("jax_disable_jit", True)
    # both, since many programs call `pdb.set_trace()`
    sys.breakpointhook = pdb.set_trace = _stop_at_values


def _stop_at_values(*args: Any, **kwargs: Any) -> Any:
    """Open a prompt. Do nothing in code that is only traced to learn shapes, because it has no values to inspect."""
    frame = sys._getframe(1)
    if _is_traced(frame):
        return None
    if asks_in_terminal():
        return _Debugger(skip=_NEVER_ENTERED).set_trace(frame)
    return sys.__breakpointhook__(*args, **kwargs)


_NEVER_ENTERED = ("jax._src.lib",)
"""Modules that the debugger does not step into: JAX makes Python call them at each garbage collection."""


def _is_traced(frame: FrameType) -> bool:
    from distlaunch.patches.tensorflow_late import is_imported, tf

    in_graph = is_imported() and not tf.executing_eagerly()
    if "jax" not in sys.modules:
        return in_graph
    import jax
    import jax.core

    try:  # a gradient is traced too, but with values
        for value in jax.tree.leaves(list(frame.f_locals.values())):
            if isinstance(value, jax.core.Tracer):
                bool(jax.numpy.any(value))
    except jax.errors.ConcretizationTypeError:
        return True
    return in_graph


class _Debugger(pdb.Pdb):
    has_quit = False  # shared by all debuggers: each `breakpoint()` makes one

    def do_quit(self, arg: str) -> bool | None:
        """Quit, and interrupt the main thread if this is another one.

        `data.map` runs in a thread of TensorFlow, which replaces exceptions by its own.
        """
        _Debugger.has_quit = True
        if threading.current_thread() is not threading.main_thread():
            # hides the traceback that TensorFlow's native code logs for a function's exception
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
            _thread.interrupt_main()
        return super().do_quit(arg)

    do_q = do_exit = do_quit


@contextlib.contextmanager
def _never_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that never asks to stop: Ctrl-C belongs to the debugger.

    Outside the debugger, Ctrl-C ends the run. So does `q` in the debugger, even if TensorFlow replaces its exception by
    another.
    """
    stderr = os.dup(_STDERR)
    try:
        yield lambda: False
    except Exception:
        if _Debugger.has_quit:
            raise KeyboardInterrupt from None
        raise
    finally:
        os.dup2(stderr, _STDERR)


if __name__ == "__main__":
    main()
