"""What is compiled is kept for the next run of the same structure; data, arguments and models are not."""

import gc
import weakref

import jax
import numpy as np
import pytest

from tests.infer.saved_runs import runs
from tests.tiers import thorough


def array_leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray) and leaf.size > 1]


@pytest.mark.parametrize(
    "name", ["ep", *thorough("structured_mean_field", "ep_tree", "inla", "bilinear", "variational_gaussian")]
)
def test_nothing_of_a_run_is_kept_when_the_engine_is_gone(name):
    run = runs()[name]
    given, kwargs = jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) else x, (run.args, run.kwargs))

    original = run.model

    def model(*args, **kwargs):
        return original(*args, **kwargs)

    engine = run.engine(model, **run.options)
    engine.run(jax.random.key(0), *given, **kwargs)
    engine.get_samples()
    asked = [(site.mean, site.variance) for site in engine.posterior.values()]
    asked += [engine.hyper, engine.describe()]
    kept = {f"argument {i}": x for i, x in enumerate(array_leaves((given, kwargs)))}
    if name != "ep_tree":  # matrices of a wavelet are kept by its name
        kept |= {f"data {i}": x for i, x in enumerate(array_leaves(engine._run.reading.data))}
    kept |= {"model": model, "reading": engine._run.reading, "engine": engine}
    references = {what: weakref.ref(x) for what, x in kept.items()}
    del engine, model, given, kwargs, kept, asked, run
    gc.collect()
    assert not [what for what, reference in references.items() if reference() is not None]
