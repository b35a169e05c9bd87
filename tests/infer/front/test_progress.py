"""What the bar says while a program is compiled, and what it reckons with after."""

import time

import jax
import pytest

from numpyro_ext.infer.front.running.progress import progress_bar


def test_it_says_that_it_compiles_and_does_not_count_that_time(capsys):
    with progress_bar(100, "EP", delay=0.05) as bar:
        jax.jit(lambda x: x + 12345.0)(1.0)
        time.sleep(0.3)
        said = capsys.readouterr().err
        assert "compiling" in said and "0/100" in said
        bar.update(10)
        bar.update(10)
        assert bar.format_dict["elapsed"] < 0.2
        bar.refresh()
        said = capsys.readouterr().err
        assert "20/100" in said.split("\r")[-1] and "compiling" not in said.split("\r")[-1]


def test_iterations_without_a_known_end_are_counted_and_promise_no_end(capsys):
    with progress_bar(None, "EP", unit="steps", delay=0.0) as bar:
        bar.update(3)
        bar.refresh()
    said = capsys.readouterr().err.split("\r")[-1]
    assert "EP: 3 steps" in said and "%" not in said and "100" not in said


@pytest.mark.parametrize("enabled", [True, False])
def test_what_has_been_compiled_says_nothing(capsys, enabled):
    function = jax.jit(lambda x: x + 54321.0)
    function(1.0)
    with progress_bar(100, "EP", delay=0.05, enabled=enabled) as bar:
        function(1.0)
        time.sleep(0.2)
        bar.update(1)
    assert capsys.readouterr().err == ""
