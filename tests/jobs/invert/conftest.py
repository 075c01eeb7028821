import pytest

pytest.importorskip("scipy", reason="the solver steps through time with scipy")
