"""Arguments that hold observations and masks, as users write them: pandas, lists, booleans, nan, single precision."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random
from numpyro import handlers

from numpyro_ext.design import SequentialDesign
from numpyro_ext.infer import EP

X = np.linspace(-1.0, 2.0, 6)
Y = np.random.default_rng(0).normal(size=6)  # of more digits than single precision has
SEEN = np.arange(6) < 2


def line(x, y, seen):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with handlers.mask(mask=jnp.asarray(seen)):
        numpyro.sample("y", dist.Normal(slope * jnp.asarray(x), 0.5), obs=jnp.asarray(y))


def labels(x, y, seen):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


def missing(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with handlers.mask(mask=~jnp.isnan(y)):
        numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=jnp.nan_to_num(y))


def table(data, seen):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(slope * data[:, 0], 0.5), obs=data[:, 1])


CASES = {
    "arrays": (line, (X, np.where(SEEN, Y, 0.0), SEEN), Y),
    "lists": (line, (X.tolist(), np.where(SEEN, Y, 0.0).tolist(), SEEN.tolist()), Y),
    "pandas": (line, (pd.Series(X), pd.Series(Y, index=list("abcdef")), pd.Series(SEEN)), Y),
    "booleans": (labels, (X, (Y > 0) & SEEN, SEEN), Y > 0),
    "nan": (missing, (X, np.where(SEEN, Y, np.nan)), Y),
}


@pytest.mark.float32
@pytest.mark.parametrize("case", CASES)
def test_observations_are_found_where_users_put_them(case):
    model, args, values = CASES[case]
    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), *args)
    design = SequentialDesign(engine, refit_every=2)
    for place in (3, 5):
        design.observe(place, values[place])
    assert design.history["is_refit"].values.tolist() == [False, True]
    seen = SEEN | np.isin(np.arange(6), (3, 5))
    by_hand = EP(model, progress_bar=False)
    by_hand.run(random.key(0), *((X, np.where(seen, values, np.nan)) if case == "nan" else (X, values, seen)))
    np.testing.assert_allclose(engine.log_evidence, by_hand.log_evidence, rtol=1e-5)
    np.testing.assert_allclose(engine.posterior["slope"].mean, by_hand.posterior["slope"].mean, rtol=1e-5)
    if case == "pandas":
        assert list(engine._args[1].index) == list("abcdef")


def test_sites_with_one_mask_are_told_together():
    def two(x, y, z, seen):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
            numpyro.sample("z", dist.Normal(-slope * x, 0.5), obs=z)

    engine = EP(two, progress_bar=False)
    engine.run(random.key(0), X, Y, -Y, SEEN)
    design = SequentialDesign(engine, refit_every=1)
    with pytest.raises(ValueError, match=r"sites \['y', 'z'\] have one mask, the argument 'seen': tell"):
        design.observe(("y", 3), Y[3])
    assert design.num_observed == 4
    design.observe([("y", 3), ("z", 3)], [Y[3], -Y[3]])
    assert design.num_observed == 6 and engine._args[3].tolist() == (SEEN | (np.arange(6) == 3)).tolist()


def test_what_cannot_be_told_is_asked_for():
    engine = EP(table, progress_bar=False)
    engine.run(random.key(0), np.stack([X, Y], 1), SEEN)
    with pytest.raises(ValueError, match="Which argument of the model holds the observations of site 'y'.*none does"):
        SequentialDesign(engine, refit_every=1)
