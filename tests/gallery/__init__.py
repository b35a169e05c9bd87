"""Published models as people write them: the gallery that reading, engines and their documentation are held to.

Each is written down here from what its source describes, with integer literals and idioms as they are typed, and has
small data that are simulated from a fixed seed or public facts.
"""

from . import (
    item_response,
    latent_variables,
    missing_data,
    multilevel,
    no_field,
    recurrences,
    regression,
    regression_of_counts,
    sparsity,
    spatial,
    survival,
    time_series,
)
from .catalogue import GAUSSIAN, MODELS, Published, Refusal

__all__ = [
    "GAUSSIAN",
    "MODELS",
    "Published",
    "Refusal",
    "item_response",
    "latent_variables",
    "missing_data",
    "multilevel",
    "no_field",
    "recurrences",
    "regression",
    "regression_of_counts",
    "sparsity",
    "spatial",
    "survival",
    "time_series",
]
