"""The comparisons with the recordings once more, compiled as users compile: what optimising compilers make of the roundings."""

import pytest

from tests.test_recordings import SETS, modules_agree, run_agrees

REST = [pytest.param(name, marks=pytest.mark.exhaustive) for name in SETS[1:]]


@pytest.mark.parametrize("name", [SETS[0], *REST])
def test_run_agrees_with_the_recording_as_users_compile_it(name):
    run_agrees(name)


@pytest.mark.parametrize("name", [pytest.param(SETS[0], marks=pytest.mark.exhaustive), *REST])
def test_modules_agree_from_recorded_inputs_as_users_compile_them(name):
    modules_agree(name)
