"""Readings of earlier runs, and engines that choose other layouts."""

from typing import Any


def forget_readings() -> None:
    """Read models as if none had been read before."""
    from numpyro_ext.compilation.store import clear
    from numpyro_ext.structure.latent_gaussian.read import LastReading

    clear(LastReading)


def log_densities(reading: Any, rng_key: Any, spreads: tuple[float, ...] = (0.1, 0.5, 1.0)) -> Any:
    """Log joint densities by the form and by NumPyro at random points, one row per spread."""
    from numpyro_ext.structure.model.verification import evaluate

    return evaluate(reading, rng_key, spreads).rows[:, :2]


def with_fit_costs(engine: Any, **costs: Any) -> Any:
    """A class of engines like another one, which choose how to fit by other costs."""
    from numpyro_ext.infer.gaussian.fitting.costs import FitCosts

    return type(engine.__name__, (engine,), {"_costs": FitCosts(**costs)})


def with_forest_costs(engine: Any, **costs: int) -> Any:
    """A class of engines like another one, which take large forests in other parts."""
    from numpyro_ext.potentials.trees.chunks import ForestCosts

    return type(engine.__name__, (engine,), {"_forest_costs": ForestCosts(**costs)})


def with_layouts(engine: Any, **costs: Any) -> Any:
    """A class of engines like another one, which choose the layouts of forms by other costs."""
    from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
    from numpyro_ext.structure.latent_gaussian.read import with_costs

    forms = tuple(with_costs(form, LayoutCosts(**costs)) for form in engine.forms)
    return type(engine.__name__, (engine,), {"forms": forms})
