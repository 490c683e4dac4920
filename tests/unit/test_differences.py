"""Tests of how the differences between two configs are described, in the notation of users."""

from __future__ import annotations

from distlaunch.config.differences import OF_THE_MODEL, differences


def test_only_what_makes_the_model_is_told() -> None:
    before = {"model": {"function": "a:b", "args": {}}, "train": {"epochs": 2}, "data": {"class_weight": {"0": 1.0}}}
    now = {
        "model": {"function": "a:b", "args": {"units": 8}},
        "train": {"epochs": 3},
        "data": {"class_weight": {0: 1.0}},
    }
    assert differences(before, now, OF_THE_MODEL) == ["model.args.units: not set -> 8"]
    assert differences(before, now) == ["model.args.units: not set -> 8", "train.epochs: 2 -> 3"]
    assert differences(now, before, OF_THE_MODEL) == ["model.args.units: 8 -> not set"]


def test_configs_as_json_holds_them_are_equal() -> None:
    config = {"data": {"class_weight": {10: 1.0, 9: float("inf")}}, "model": {"args": {"shape": (1, 2)}}}
    read_back = {"data": {"class_weight": {"9": "inf", "10": 1.0}}, "model": {"args": {"shape": [1, 2]}}}
    assert differences(config, read_back) == []


def test_an_argument_that_is_an_empty_mapping_is_told() -> None:
    before, now = {"model": {"args": {"a": 1, "b": {}}}}, {"model": {"args": {"a": {}, "b": {"c": 2}, "d": {}}}}
    assert differences(before, now) == [
        "model.args.a: 1 -> {}", "model.args.b.c: not set -> 2", "model.args.d: not set -> {}",
    ]  # fmt: skip


def test_keys_with_dots_are_keys_of_their_own() -> None:
    assert differences({"args": {"a.b": 1}}, {"args": {"a": {"b": 1}}}) == [
        "args.a.b: not set -> 1", "args.a.b: 1 -> not set",
    ]  # fmt: skip
