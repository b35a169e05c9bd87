"""Runs of sequential Monte Carlo: results, files, runs that go on after an interruption, updates, shared programs."""

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from scipy.stats import multivariate_normal

from numpyro_ext.infer import SMC
from tests.compilations import compiled_programs
from tests.infer.monte_carlo.levels import Y, level_evidence, level_model, with_param

KEY = random.key(0)
X = np.random.default_rng(0).normal(size=(20, 3))


def groups(group, y=None):
    number = len(np.unique(group))  # needs values
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", number):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    rate = numpyro.deterministic("rate", jnp.exp(scale * effect))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Poisson(rate[group]), obs=y)


GROUP = np.repeat(np.arange(4), 5)
COUNTS = np.array([1, 0, 2, 1, 1, 4, 3, 5, 2, 4, 0, 0, 1, 0, 0, 2, 2, 1, 3, 1])


@pytest.fixture(scope="module")
def grouped():
    smc = SMC(groups, num_particles=1000, progress_bar=False)
    smc.run(KEY, GROUP, COUNTS)
    return smc


@pytest.mark.slow
def test_against_nuts(grouped):
    mcmc = MCMC(NUTS(groups), num_warmup=1000, num_samples=20_000, progress_bar=False)
    mcmc.run(KEY, GROUP, COUNTS)
    truth, smc = mcmc.get_samples(), SMC(groups, num_particles=10_000, progress_bar=False)
    smc.run(KEY, GROUP, COUNTS)
    for name, draws in smc.get_samples().items():
        sd = truth[name].std(0)
        assert np.all(np.abs(draws.mean(0) - truth[name].mean(0)) < 0.05 * sd), name
        np.testing.assert_allclose(draws.std(0), sd, rtol=0.05)


@pytest.mark.thorough
def test_results_are_those_of_a_sampler(grouped):
    draws = grouped.get_samples()
    assert {name: value.shape for name, value in draws.items()} == {
        "scale": (1000,),
        "effect": (1000, 4),
        "rate": (1000, 4),
    }
    assert grouped.get_samples(group_by_chain=True)["effect"].shape == (4, 250, 4)
    np.testing.assert_allclose(draws["rate"], np.exp(draws["scale"][:, None] * draws["effect"]), rtol=1e-6)
    assert grouped.get_extra_fields()["potential_energy"].shape == (1000,)
    data = grouped.to_arviz(posterior_predictive=True)
    assert data["posterior"]["effect"].shape == (4, 250, 4)
    assert data["posterior_predictive"]["y"].shape == (4, 250, 20)
    assert bool(data["posterior"].attrs["converged"])
    assert np.isfinite(float(az.loo(data).elpd_loo if hasattr(az.loo(data), "elpd_loo") else az.loo(data).elpd))
    assert "posterior" in az.from_numpyro(grouped)
    assert "SMC(groups): converged" in repr(grouped)
    history = grouped.history
    assert float(history["position"][-1]) == 1.0
    assert np.all(np.diff(history["position"]) > 0)


@pytest.mark.thorough
def test_summary(grouped, capsys):
    grouped.print_summary()
    printed = capsys.readouterr().out
    assert "effect[3]" in printed
    assert "rate[0]" not in printed
    assert f"Log evidence: {grouped.log_evidence:.3f} +- " in printed
    weights, effect = np.asarray(grouped.weights), np.asarray(grouped.particles["effect"])
    np.testing.assert_allclose(grouped.posterior["effect"].mean, weights @ effect, rtol=1e-5)
    np.testing.assert_allclose(grouped.posterior["effect"].quantile(0.3), np.quantile(effect, 0.3, axis=0), atol=0.02)
    grouped.print_summary(var_names="effect", coords={"letter": list("abcd")}, dims={"effect": ["letter"]})
    assert "effect[d]" in (printed := capsys.readouterr().out) and "scale" not in printed
    assert grouped.get_samples(num_samples=300)["rate"].shape == (300, 4)


@pytest.mark.thorough
def test_file(grouped, tmp_path):
    grouped.save(tmp_path / "run")
    loaded = SMC.load(tmp_path / "run", groups)
    assert loaded.log_evidence == grouped.log_evidence
    assert loaded.log_evidence.standard_error == grouped.log_evidence.standard_error
    np.testing.assert_array_equal(loaded.get_samples()["rate"], grouped.get_samples()["rate"])
    with pytest.raises(ValueError, match="it was another model"):
        SMC.load(tmp_path / "run", lambda group, y: level_model(y))


def interrupted_after(smc, steps, monkeypatch):
    """Runs of the sampler are interrupted before they take more steps."""
    from numpyro_ext.infer.monte_carlo.kernels.steps import Programs

    original, count = Programs.step, [0]

    def step(self, *args, **kwargs):
        if count[0] == steps:
            raise KeyboardInterrupt
        count[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Programs, "step", step)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["state", "checkpoint"])
def test_an_interrupted_run_goes_on(grouped, by, monkeypatch, tmp_path):
    smc = SMC(groups, num_particles=1000, progress_bar=False)
    options = {"checkpoint": tmp_path / "steps"} if by == "checkpoint" else {}
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="was stopped at 0"):
        interrupted_after(smc, 1, patch)
        smc.run(KEY, GROUP, COUNTS, **options)
    assert not smc.diagnostics.converged
    assert smc.get_samples()["scale"].shape == (1000,)  # usable
    options = options or {"init_state": smc.last_state}
    smc.run(KEY, GROUP, COUNTS, **options)
    assert smc.log_evidence == grouped.log_evidence
    np.testing.assert_array_equal(smc.get_samples()["rate"], grouped.get_samples()["rate"])
    if by == "checkpoint":
        with pytest.raises(ValueError, match="on other data"):
            smc.run(KEY, GROUP, COUNTS + 1, **options)


@pytest.mark.thorough
def test_an_interrupted_update_keeps_the_posterior(monkeypatch):
    smc = SMC(level_model, num_particles=100, progress_bar=False)
    smc.run(KEY, Y, np.arange(40) < 20)
    before = smc.log_evidence
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="posterior is the one before"):
        interrupted_after(smc, 0, patch)
        smc.update(Y)
    assert smc.log_evidence == before
    with pytest.raises(ValueError, match=r"'y'\[3\] \(value nan\)"):
        smc.update(np.where(np.arange(40) == 3, np.nan, Y), np.arange(40) < 30)
    assert smc.log_evidence == before


@pytest.mark.parametrize("by", ["itself", "checkpoint"])
@pytest.mark.thorough
def test_an_interrupted_update_goes_on(by, monkeypatch, tmp_path):
    """Between its tempering steps: as if it had not been interrupted."""
    few, shifted = np.arange(40) < 4, Y + 3.0  # so far from the first data that it takes several steps

    def begun():
        smc = SMC(level_model, num_particles=100, progress_bar=False)
        smc.run(KEY, Y, few)
        return smc

    options = {"checkpoint": tmp_path / "update"} if by == "checkpoint" else {}
    whole, smc = begun(), begun()
    whole.update(shifted)
    assert int((whole.history["stage"] == 1).sum()) > 2
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="posterior is the one before"):
        interrupted_after(smc, 2, patch)
        smc.update(shifted, **options)
    assert int(smc.history["stage"].max()) == 0
    if by == "checkpoint":
        smc = begun()  # as in another process
        with pytest.raises(ValueError, match="on other data"):
            smc.update(Y, **options)
    made = []
    monkeypatch.setattr(smc, "_go", lambda *args, go=smc._go: made.append(args[1].num_steps) or go(*args))
    smc.update(shifted, **options)
    assert made == [smc.history.sizes["step"] - int((whole.history["stage"] == 1).sum()) + 2]
    assert smc.log_evidence == whole.log_evidence
    np.testing.assert_array_equal(smc.get_samples()["level"], whole.get_samples()["level"])


@pytest.mark.thorough
def test_other_data_of_equal_shapes_compile_nothing():
    smc = SMC(level_model, num_particles=100, progress_bar=False)
    smc.run(KEY, Y, np.arange(40) < 10)
    smc.update(Y, np.arange(40) < 11)
    with compiled_programs() as compiled:
        smc.update(Y, np.arange(40) < 12)
        smc.update(Y + 0.0, np.arange(40) < 20)
        smc.run(random.key(1), Y[::-1].copy(), np.arange(40) < 30)
    assert not compiled


@pytest.mark.thorough
def test_samplers_of_one_model_share_programs_and_know_their_data():
    evidences = []
    for y in (Y[:20], Y, Y[:20]):
        smc = SMC(level_model, num_particles=500, path="data", progress_bar=False)
        smc.run(KEY, y)
        assert abs(smc.log_evidence - level_evidence(y)) < 3.5 * smc.log_evidence.standard_error
        evidences.append(float(smc.log_evidence))
    assert evidences[0] == evidences[2]
    given = [SMC(with_param, num_particles=500, hyper_values={"scale": s}, progress_bar=False) for s in (1, 2.0)]
    for smc, scale in zip(given, (1.0, 2.0), strict=True):
        smc.run(KEY, Y)
        assert abs(smc.log_evidence - level_evidence(Y / scale)) < 3.5 * smc.log_evidence.standard_error


@pytest.mark.thorough
def test_one_model_on_data_that_change_the_number_of_unknowns():
    def slopes(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)

    for columns in (1, 3):
        x = X[:, :columns]
        smc = SMC(slopes, num_particles=500, progress_bar=False)
        smc.run(KEY, x, Y[:20])
        exact = multivariate_normal.logpdf(Y[:20], np.zeros(20), np.eye(20) + x @ x.T)
        assert abs(smc.log_evidence - exact) < 3.5 * smc.log_evidence.standard_error


@pytest.mark.thorough
def test_updates_that_change_the_prior():
    def scaled(y):
        level = numpyro.sample("level", dist.Normal(0, jnp.std(y)))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)

    def sized(y):
        level = numpyro.sample("level", dist.Normal(0, 1).expand(y.shape))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)

    smc = SMC(scaled, num_particles=100, progress_bar=False)
    with pytest.raises(RuntimeError, match="should be called first"):
        smc.update(Y)
    smc.run(KEY, Y[:20])
    with pytest.raises(ValueError, match="prior of site 'level' is another one"):
        smc.update(Y)
    smc = SMC(sized, num_particles=100, progress_bar=False)
    smc.run(KEY, Y[:3])
    with pytest.raises(ValueError, match=r"level \(4,\), before level \(3,\)"):
        smc.update(Y[:4])
