"""Any config is the same after it was written and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.base import strict_json
from distlaunch.base.errors import ConfigError
from distlaunch.checkpoints.meta import Progress, meta_text, read_meta
from distlaunch.config.differences import differences
from distlaunch.config.dump import dump_config
from distlaunch.config.read.load import load_config, load_resolved
from distlaunch.config.references.sites import with_absolute_files
from distlaunch.config.run import RunConfig
from tests.properties.drawn import configs, fitting, plain, problems_of


def exactly(config: RunConfig) -> str:
    """All values with their types; NaN equals itself."""
    return repr(config.to_plain())


@given(configs() | fitting())
def test_the_config_of_a_run_is_read_as_it_was_written(tmp_path_factory: Any, config: RunConfig) -> None:
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert exactly(load_resolved(path)) == exactly(config)


@given(configs() | fitting())
def test_a_written_config_is_a_config_file(tmp_path_factory: Any, config: RunConfig) -> None:
    """It has the mistakes of the config itself, and where it has none it is the same."""
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    named = with_absolute_files(config.model_copy(update={"name": config.name or "job"}), lambda key: path.parent)
    own = problems_of(named)
    if own:
        with pytest.raises(ConfigError) as caught:
            load_config(path, environ={})
        found = caught.value.problems
        assert {(each.key, each.message) for each in found} == {(each.key, each.message) for each in own}
    else:
        assert exactly(load_config(path, environ={}).config) == exactly(named)


@given(configs() | fitting())
def test_a_checkpoint_has_the_config_that_it_was_written_with(config: RunConfig) -> None:
    meta = read_meta(meta_text([], 1.0, Progress(), config.to_plain()).encode())
    assert meta is not None
    assert differences(meta.config, config.to_plain()) == []


arguments = st.dictionaries(st.sampled_from(["a", "b", "a.b", ""]), plain, max_size=2)


@given(arguments, arguments)
def test_configs_that_differ_have_differences(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Two configs have differences exactly if their JSON differs. There, `.nan` is the text `nan`."""
    same = as_json(before) == as_json(now)
    assert bool(differences(before, now)) != same


def as_json(config: dict[str, Any]) -> str:
    return json.dumps(json.loads(strict_json.dumps(config)), sort_keys=True)
