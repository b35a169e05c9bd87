"""Readings of earlier runs, and engines that choose other layouts."""

from typing import Any

import pytest


def forget_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read models as if none had been read before."""
    from numpyro_ext.compilation.recent import Recent
    from numpyro_ext.structure.latent_gaussian import read

    monkeypatch.setattr(read, "_KEPT", Recent(16))


def with_layouts(engine: Any, **costs: Any) -> Any:
    """A class of engines like another one, which choose the layouts of forms by other costs."""
    from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
    from numpyro_ext.structure.latent_gaussian.read import with_costs

    forms = tuple(with_costs(form, LayoutCosts(**costs)) for form in engine.forms)
    return type(engine.__name__, (engine,), {"forms": forms})
