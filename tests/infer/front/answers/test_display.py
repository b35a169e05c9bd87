"""What engines, posteriors, diagnostics and readings show of themselves, as text and in notebooks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.display import Shown, Table
from numpyro_ext.infer import EP, INLA, LaplaceApproximation, table_rows, variational_em
from numpyro_ext.infer.front.results import HyperEstimate
from numpyro_ext.infer.gaussian.cross_validation import CrossValidation
from numpyro_ext.structure import read_latent_gaussian


def scaled_line(x, y=None):
    scale = numpyro.sample("scale<b>", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, scale).expand([12]).to_event(1))
    numpyro.deterministic("fitted", x @ slopes)
    numpyro.sample("y", dist.Normal(x @ slopes, 0.5), obs=y)


X = jnp.sin(jnp.arange(20.0)[:, None] * jnp.arange(1.0, 13.0))
Y = X @ jnp.linspace(-1.0, 1.0, 12)


@pytest.fixture(scope="module")
def inla():
    engine = INLA(scaled_line, num_samples=50, progress_bar=False)
    engine.run(jax.random.key(0), X, Y)
    return engine


def test_what_is_shown_is_escaped_in_html_and_aligned_in_text():
    class Fit(Shown):
        def _shown(self):
            return ["<script>", "a & b", Table(["x", "long header"], [["<i>", "1"], ["longer", "2"]])]

    html, text = Fit()._repr_html_(), repr(Fit())
    assert "<script>" not in html and "<i>" not in html and "a &amp; b" in html and html.count("<tr>") == 3
    columns = [line.index(word) for line, word in zip(text.split("\n")[2:], ("long", "1", "2"), strict=True)]
    assert len(set(columns)) == 1


@pytest.mark.thorough
def test_engine_before_and_after_its_run(inla):
    engine = LaplaceApproximation(scaled_line, progress_bar=False, max_hyper_steps=1, integrate="none")
    assert repr(engine) == "LaplaceApproximation(scaled_line): not run yet"
    assert repr(LaplaceApproximation(partial(scaled_line, y=Y))) == repr(engine)
    with pytest.warns(UserWarning, match="did not converge"):
        engine.run(jax.random.key(0), X, Y)
    assert repr(engine).startswith("LaplaceApproximation(scaled_line): NOT converged")
    assert "at the best hyperparameters" in repr(engine) and "scale<b>" in repr(engine)
    assert f"log evidence: {float(engine.log_evidence):.2f}" in repr(engine)
    assert "scale&lt;b&gt;" in engine._repr_html_() and "scale<b>" not in engine._repr_html_()
    assert repr(inla).startswith("INLA(scaled_line): converged") and "integrated over a lattice of" in repr(inla)


@pytest.mark.thorough
def test_run_from_a_file_is_shown_without_exploring_its_design(inla, tmp_path):
    inla.save(tmp_path / "run")
    loaded = INLA.load(tmp_path / "run", scaled_line)
    assert "log evidence" not in repr(loaded) and "exploration" not in vars(loaded._run)
    float(loaded.log_evidence)
    assert "log evidence" in repr(loaded)


def test_posteriors_show_their_moments(inla):
    site = inla.posterior["slopes"]
    lines = repr(site).split("\n")
    assert f"{float(site.mean[3]):.2f}" in lines[5] and f"{float(site.sd[3]):.2f}" in lines[5]
    assert lines[-1].strip() == "and 2 more" and "and 2 more" in site._repr_html_()
    shown = repr(inla.posterior)
    assert "slopes" in shown and "(20,)" in shown and f"{float(site.sd.max()):.2f}" in shown
    assert f"{float(inla.hyper['scale<b>'].mean):.2f}" in repr(inla.hyper["scale<b>"])
    assert "&lt;b&gt;" in inla.hyper["scale<b>"]._repr_html_()


def test_diagnostics_and_readings_show_sentences(inla):
    found = inla.diagnostics._replace(edges=("tau",), points=("b",), converged=False, messages=("Said < this.",))
    assert "NOT converged" in repr(found) and "edge of the support: tau" in repr(found) and "point" in repr(found)
    assert "Said &lt; this." in found._repr_html_()
    reading = read_latent_gaussian(scaled_line, (X, Y))
    assert repr(reading).startswith("LatentGaussianReading\n  field: slopes (12,)")
    assert "hyperparameter: scale&lt;b&gt;" in reading._repr_html_()
    assert "structure" in repr(reading.structure.value)


def test_a_hyperparameter_shows_value_and_error():
    one = HyperEstimate(np.float64(1.234), np.float64(0.25), np.float64(0.2), np.float64(0.1))
    assert "1.23" in repr(one) and "0.25" in repr(one) and "<table>" in one._repr_html_()
    many = HyperEstimate(np.arange(12.0), None, np.arange(12.0), None, True)
    assert "[9]" in repr(many) and "[10]" not in repr(many) and "fixed" in repr(many) and "and 2 more" in repr(many)


def test_coordinates_label_the_summary(capsys):
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([2, 3]))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    engine = EP(model, progress_bar=False, hyper_values={"scale": 1.0})
    engine.run(jax.random.key(0), np.arange(6.0).reshape(2, 3))
    engine.print_summary(coords={"shop": ["north", "south"]}, dims={"effect": ["shop", "day"]})
    shown = capsys.readouterr().out
    assert "effect[north,0]" in shown and "effect[south,2]" in shown
    with pytest.raises(ValueError, match="3 labels of 'shop'; site 'effect' has 2"):
        engine.print_summary(coords={"shop": ["a", "b", "c"]}, dims={"effect": ["shop", "day"]})
    with pytest.raises(ValueError, match="1 dimensions"):
        engine.print_summary(dims={"effect": ["shop"]})


def test_results_on_arrays_show_themselves_in_a_few_lines():
    """Tables, their fits, fits of preferences and cross-validations printed thousands of numbers."""
    table = np.array([[0.5, 1], [np.nan, 0], [-0.2, 1], [0.1, 0]])
    rows = table_rows(table, kinds=["real", "binary"], num_factors=1)
    fit = variational_em(rows, learn=("intercept",), num_steps=2, progress_bar=False)
    assert "4 rows of 1 latent variables and 2 predictors" in repr(rows) and "1 cells are missing" in repr(rows)
    assert "after 2 iterations" in repr(fit) and "4 rows of 1 latent" in repr(fit)
    folds = CrossValidation(np.full((2, 5), -1.0), np.zeros((2, 5), int), {}, np.array([[True, True], [True, False]]))
    assert "2 folds of 5 observations, drawn 2 times" in repr(folds)
    assert "-5.00 in all" in repr(folds) and "3 of 4 fits converged" in repr(folds)
    for shown in (rows, fit, folds):
        assert len(repr(shown)) < 500 and shown._repr_html_().startswith("<div>")
