"""What cells of a matrix tell of the vector of a user, the items being a nuisance."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers
from scipy.special import entr

from numpyro_ext.design import expected_information_gain
from numpyro_ext.design.outcomes.vectors import sigma_points
from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from tests.tiers import thorough

ORDINAL = json.loads((Path(__file__).parents[1] / "reference" / "hm_bald_ordinal.json").read_text())
USER, ITEM = (axis.reshape(-1) for axis in np.indices((4, 3)))
SEEN = np.arange(12) % 3 != 1
NUM_DRAWS = 4000


def ordinal_tables(item, users):
    """Probabilities of the categories of an item under vectors of the user, or of its moments over all of them."""
    mean, variance, cuts, cut_variance = (np.array(item[name]) for name in ("v_mean", "v_var", "b_mean", "b_var"))
    if users is None:
        user, spread = np.array(ORDINAL["user_mean"]), np.array(ORDINAL["user_var"])
        at = np.array([user @ mean])
        wide = np.array([spread @ (mean**2 + variance) + user**2 @ variance])
    else:
        at, wide = users @ mean, users**2 @ variance
    below = norm.cdf((cuts - at[:, None]) / np.sqrt(wide[:, None] + item["v_gamma"] + cut_variance))
    below = np.concatenate([np.zeros((len(at), 1)), below, np.ones((len(at), 1))], axis=1)
    return np.diff(np.maximum.accumulate(below, axis=1), axis=1)


@pytest.mark.thorough
def test_ordered_ratings_of_a_new_user():
    """Entropies given the vector by points and by quadrature; the reference takes the first entropy from moments."""
    mean, variance = np.array(ORDINAL["user_mean"]), np.array(ORDINAL["user_var"])
    points = np.asarray(sigma_points(Block(jnp.array([mean]), jnp.array([variance]))))[:, 0]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes), -1).reshape(-1, 3)
    mass = np.prod(np.stack(np.meshgrid(weights, weights, weights), -1).reshape(-1, 3), -1)
    for number, item in enumerate(ORDINAL["items"]):
        entropy = entr(ordinal_tables(item, None)).sum()
        np.testing.assert_allclose(entropy, ORDINAL["predictive_entropy_nats"][number], atol=1e-9)
        for users, share, name, tol in (
            (points, None, "unscented_kappa0", 1e-9),
            (mean + grid * np.sqrt(variance), mass, "bald_nats_gauss_hermite", 1e-5),
        ):
            given = np.average(entr(ordinal_tables(item, users)).sum(axis=-1), axis=0, weights=share)
            np.testing.assert_allclose(entropy - given, ORDINAL[name][number], atol=tol)


def test_points_have_the_moments_of_vectors():
    root = np.random.default_rng(0).normal(size=(5, 3, 3))
    mean, covariance = root[:, 0], root @ root.swapaxes(1, 2)
    for given in (covariance, np.diagonal(covariance, axis1=1, axis2=2)):
        points = np.asarray(sigma_points(Block(jnp.asarray(mean), jnp.asarray(given))))
        np.testing.assert_allclose(points.mean(0), mean, atol=1e-12)
        found = np.einsum("pui,puj->uij", points - mean, points - mean) / len(points)
        expected = given if given.ndim == 3 else given[:, :, None] * np.eye(3)
        np.testing.assert_allclose(found, expected, atol=1e-10)


def ratings(user, item, r=None, seen=True, family="binary"):
    u = numpyro.sample("u", dist.Normal(0, 1).expand([4, 2]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0.5, 1).expand([3, 2]).to_event(2))
    product = jnp.sum(u[user] * v[item], -1)
    site = {
        "binary": lambda: dist.Bernoulli(logits=product),
        "probit": lambda: dist.Bernoulli(probs=norm.cdf(product)),
        "noise": lambda: dist.Normal(product, 0.5),
    }[family]()
    with handlers.mask(mask=seen):
        numpyro.sample("r", site, obs=r)


def fitted(kind, family):
    engine = kind(ratings, progress_bar=False, num_samples=NUM_DRAWS)
    r = np.random.default_rng(0).integers(0, 2, 12)
    engine.run(random.key(0), USER, ITEM, r, SEEN, family=family)
    return engine


def outcomes_at(family, mean, variance):
    """Probabilities, and widths of the outcomes, by a rule over a Gaussian predictor, and a grid of real ones."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    f = mean[..., None] + np.sqrt(variance)[..., None] * nodes
    weights = weights / weights.sum()
    if family == "noise":
        y = np.linspace(-25.0, 25.0, 501)
        sd = np.sqrt(0.25 + variance)[..., None]
        return np.asarray(norm.pdf(y, mean[..., None], sd)), y[1] - y[0]
    p = (np.asarray(norm.cdf(f)) if family == "probit" else 1.0 / (1.0 + np.exp(-f))) @ weights
    return np.stack([1.0 - p, p], -1), 1.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "family"),
    [(BilinearEP, "probit"), *thorough((BilinearVG, "binary"), (BilinearVG, "noise"))],
)
def test_items_are_integrated_out(kind, family):
    engine = fitted(kind, family)
    gain = expected_information_gain(engine, focus={"u": [1, 2]})["r"]
    candidates = np.flatnonzero(np.isfinite(gain))
    np.testing.assert_array_equal(candidates, np.flatnonzero(~SEEN))
    points, mode = (
        expected_information_gain(engine, focus="u", method=method)["r"] for method in ("sigma-points", "mode")
    )
    u, v = (engine.posterior[name] for name in ("u", "v"))
    spread_u, spread_v = (np.reshape(s.covariance(), (2 * n, 2 * n)) for s, n in ((u, 4), (v, 3)))
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    grid, mass = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2), np.outer(weights, weights).reshape(-1)
    mass /= mass.sum()
    for cell in candidates:
        if USER[cell] in (0, 3):  # of no interest
            assert abs(gain[cell]) < 1e-12
            continue
        blocks = [slice(2 * k[cell], 2 * k[cell] + 2) for k in (USER, ITEM)]
        root = np.linalg.cholesky(spread_u[blocks[0], blocks[0]])
        center, item = np.reshape(u.mean, (4, 2))[USER[cell]], np.reshape(v.mean, (3, 2))[ITEM[cell]]
        spread = spread_v[blocks[1], blocks[1]]
        corners = np.sqrt(2.0) * np.concatenate([np.eye(2), -np.eye(2)])
        users = np.concatenate([center + corners @ root.T, center[None]])
        p, step = outcomes_at(family, users @ item, np.einsum("si,ij,sj->s", users, spread, users))
        mixed, last = p[:4].mean(0), p[4]
        expected = step * np.sum(entr(mixed) - entr(last))
        np.testing.assert_allclose(mode[cell], expected, atol=1e-5)
        for users, share, found, num_draws in (
            (center + grid @ root.T, mass, gain[cell], NUM_DRAWS),
            (center + corners @ root.T, np.full(4, 0.25), points[cell], np.inf),
        ):
            p, step = outcomes_at(family, users @ item, np.einsum("si,ij,sj->s", users, spread, users))
            mixed = share @ p
            divergence = step * np.sum(p * np.log(np.maximum(p, 1e-300) / np.maximum(mixed, 1e-300)), -1)
            expected = share @ divergence
            error = np.sqrt(share @ np.square(divergence - expected) / num_draws)
            bias = 0.5 * step * np.sum(share @ np.square(p - mixed) / np.maximum(mixed, 1e-300)) / num_draws
            assert abs(found - expected) < 4.0 * error + bias + 1e-6


@pytest.mark.thorough
def test_what_vectors_cannot_be_in_focus_is_said():
    engine = fitted(BilinearEP, "probit")
    assert np.all(
        np.isfinite(
            expected_information_gain(engine, np.array([0, 3]), np.array([1, 2]), focus="v", bias_correction="delta")[
                "r"
            ]
        )
    )
    for focus, message in (
        ({"u": (1, 0)}, r"a part of vector 1, which \['u'\] make"),
        ({"u": []}, "no element of 'u'"),
        ({"u": [7]}, "whose shape is"),
        (["u", "v"], "vectors of both sides"),
        ("w", "no latent site"),
        ("r", "an observed site"),
        ([], "focus names no site"),
    ):
        with pytest.raises(ValueError, match=message):
            expected_information_gain(engine, focus=focus)
    for method in ("sigma-points", "mode"):
        with pytest.raises(ValueError, match=f"'{method}' is for a focus on vectors"):
            expected_information_gain(engine, method=method)
