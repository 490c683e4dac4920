"""Finds modules in the user's folders without letting them shadow modules of libraries.

A folder of the user may contain a file such as `random.py` or `keras.py`. If the folder were at the front of
`sys.path`, where Python puts the folder of a script, libraries that import these names would break. Therefore processes
of distlaunch start with `python -P` and add the user's folders here. For imports by libraries, the folders come last;
for imports by the user's files, they come first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType

from distlaunch.base.protocol import MODULES_FOLDER

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_IMPORTERS = ("<frozen importlib", os.path.dirname(importlib.abc.__file__ or "importlib") + os.sep)
"""Prefixes of the files of stack frames between an import statement and a finder."""


class _UserFinder(importlib.abc.MetaPathFinder):
    """Looks in the user's folders first, for imports of the user's files."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.asked_for: str | None = None
        """A module that the config names, so that it is found first although no file of the user imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or not (fullname == self.asked_for or self.is_users(_importing_file())):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, self.folders)
        # leave a folder without `__init__.py` to the finder of `sys.path`, which prefers a library with the same name
        return None if spec is None or spec.origin is None else spec

    def is_users(self, file: str) -> bool:
        """Return whether a file is in one of the folders, and belongs neither to a library nor to distlaunch."""
        if "-packages/" in file or file.startswith(_OURS + os.sep):
            return False
        return any(file.startswith(os.path.join(folder, "")) for folder in self.folders)


_FINDER = _UserFinder()


def _importing_file() -> str:
    """Return the file whose import statement is being executed."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_IMPORTERS):
        frame = frame.f_back
    return "" if frame is None else os.path.abspath(frame.f_code.co_filename)


_AFTER: list[Callable[[], None]] = []

_RECORDED: dict[str, tuple[importlib.machinery.ModuleSpec | None, bytes | None]] = {}
"""Specs and contents of the user's modules, by name. Each import or reload of a module makes a new spec."""


def modules_folder() -> Path | None:
    """Return the folder in which a task looks for modules before its working directory, or None if there is none."""
    folder = os.environ.get(MODULES_FOLDER)
    return Path(folder) if folder else None


def begin_program(program: str) -> None:
    """Set up `sys.argv` and the module folders of this task as for a program of the user in the current directory.

    Args:
        program: the file or module. It becomes the only element of `sys.argv`, which the user's code may parse.
    """
    sys.argv = [program]
    if (folder := modules_folder()) is not None:
        add_folder(folder)
    add_folder(os.getcwd())


def after_user_code(call: Callable[[], None]) -> None:
    """Register a function to call after each module or function of the user that runs during the setup of a job."""
    if call not in _AFTER:
        _AFTER.append(call)


def user_code_has_run() -> None:
    """Call the registered functions, which undo changes of the user's code to the state of this process."""
    for call in _AFTER:
        call()


def record_modules() -> None:
    """Record the contents of the user's modules that were imported or reloaded since the last call."""
    for name, module in list(sys.modules.items()):
        file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        if file is None or not _FINDER.is_users(file):
            continue
        if name not in _RECORDED or _RECORDED[name][0] is not spec:
            _RECORDED[name] = spec, content(file)


def changed_modules() -> list[str]:
    """Return the files of recorded modules whose contents have changed since they were recorded."""
    return [
        file
        for name, (_, before) in _RECORDED.items()
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None and content(file) != before
    ]


def content(file: str | Path) -> bytes | None:
    """Return the content of a file, or None if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


def add_folder(folder: str | Path) -> None:
    """Make the modules in a folder of the user importable."""
    folder = os.path.abspath(folder)
    if _FINDER not in sys.meta_path:
        # after the finders of built-in and frozen modules, before the finder of `sys.path`
        place = sys.meta_path.index(importlib.machinery.PathFinder) if importlib.machinery.PathFinder in sys.meta_path \
            else len(sys.meta_path)  # fmt: skip
        sys.meta_path.insert(place, _FINDER)
    if folder not in _FINDER.folders:
        _FINDER.folders.append(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def added_folders() -> list[str]:
    """Return the added folders, for another process."""
    return list(_FINDER.folders)


def import_users(name: str) -> ModuleType:
    """Import a module that the config names, preferably from the user's folders."""
    before, _FINDER.asked_for = _FINDER.asked_for, name.partition(".")[0]
    try:
        return importlib.import_module(name)
    finally:
        _FINDER.asked_for = before


def add_package_of(file: Path) -> None:
    """Make the modules beside a file importable, and also the package that contains the file."""
    add_folder(file.parent)
    root = package_root(file)
    if root is not None:
        add_folder(root)


def package_root(file: Path) -> Path | None:
    """Return the folder that contains the package of a file, or None if the file is in no package."""
    folder = file.parent
    if not (folder / "__init__.py").is_file():
        return None
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def hidden_by(name: str) -> tuple[Path, str] | None:
    """Return the user's file that a loaded module of this name hides, and that module's file; None if it hides none."""
    top = name.partition(".")[0]
    loaded = sys.modules.get(top)
    if loaded is None:
        return None
    spec = importlib.machinery.PathFinder.find_spec(top, [str(folder) for folder in _FINDER.folders])
    origin = getattr(loaded, "__file__", None)
    if spec is None or spec.origin is None or (origin is not None and _same(origin, spec.origin)):
        return None
    return Path(spec.origin), origin or "Python itself"


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
