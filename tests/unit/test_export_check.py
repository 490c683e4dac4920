"""Tests of the error message when the process that checks exports dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.base.errors import DistlaunchError
from distlaunch.training.export import check as export_check


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "was ended by SIGKILL (perhaps because memory ran out); nothing was replaced",
        ),
        ("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM; nothing was replaced"),
        ("import sys; sys.exit('no\\nroom')", "ended with exit code 1; nothing was replaced:\nno\nroom"),
    ],
)
def test_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    monkeypatch.setattr(export_check, "SCRIPT", path)
    with pytest.raises(DistlaunchError) as told:
        export_check.check(
            {}, None, export_check.Sample({}, None, 1e-4), export_check.ModelFunction("", {}), "tensorflow", tmp_path
        )
    assert str(told.value) == f"the process that checks the exports {expected}"
