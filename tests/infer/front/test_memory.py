"""What is compiled is kept for the next run of the same structure, and small tables of indices that it was read with;
data, arguments and models are not."""

import gc
import weakref

import jax
import numpy as np
import pytest

from numpyro_ext.structure import LatentGaussianReading
from tests.infer.front.files.saved_runs import runs


def array_leaves(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray) and leaf.size > 1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ep", "structured_mean_field", "ep_tree", "inla", "bilinear", "variational_gaussian"])
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
    data = ()
    if name != "ep_tree":  # matrices of a wavelet are kept by its name
        data = engine._run.reading.data
        # which rows see what is looked up once, and taken by the next reading
        data = data[:-1] if isinstance(engine._run.reading, LatentGaussianReading) else data
        # indices of a wavelet are constants of its program
        kept |= {f"data {i}": x for i, x in enumerate(array_leaves(data)) if isinstance(x, jax.Array)}
    kept |= {"model": model, "reading": engine._run.reading, "engine": engine}
    references = {what: weakref.ref(x) for what, x in kept.items()}
    del engine, model, given, kwargs, kept, asked, run, data
    gc.collect()
    assert not [what for what, reference in references.items() if reference() is not None]
