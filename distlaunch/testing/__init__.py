"""Tests that packages with engines of their own import. Needs pytest, which distlaunch itself does not depend on."""

import pytest

pytest.register_assert_rewrite("distlaunch.testing.engines")
