"""A model that cannot be run on what it was given: the message says what was given, and keeps the whole cause."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan

from numpyro_ext.infer import EP, BilinearVG, StructuredMeanField, cross_validate, fit_batches, grid_search
from numpyro_ext.structure import ModelStructureError, Reason, read_bilinear, read_latent_gaussian, read_sparse_linear
from numpyro_ext.structure.model.running.execution import ModelCall
from numpyro_ext.structure.model.running.pandas_arguments import run_or_with_arrays

KEY = jax.random.key(0)
X, Y = np.ones((6, 2)), np.array([0, 1, 1, 0, 1, 0])


def model(x: Any, y: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


@pytest.mark.parametrize("run", [EP(model).run, BilinearVG(model).run, StructuredMeanField(model).run])
def test_a_forgotten_key_is_named(run: Any) -> None:
    with pytest.raises(TypeError, match=r"key comes first.*run\(jax.random.key\(0\), x, y\); got float64\[6, 2\]"):
        run(X, Y)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (0, "got 0"),
        (jax.random.split(KEY), "got 2 keys, where one is needed"),
        ([0, 1], "got a list"),
        (np.zeros(2), r"got float64\[2\]"),
    ],
)
def test_what_is_no_key(key: Any, found: str) -> None:
    engine = EP(model)
    with pytest.raises(TypeError, match=found):
        engine.run(key, X, Y)
    with pytest.raises(TypeError, match=found):
        cross_validate(engine, key, X, Y)
    with pytest.raises(TypeError, match=found):
        fit_batches(BilinearVG(model), key, [(X, Y)], over="rows")
    with pytest.raises(TypeError, match=found):
        grid_search(BilinearVG(model), key, X, Y, param_grid={"rank": [1]})


def test_both_kinds_of_keys_are_taken() -> None:
    for key in (KEY, jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        assert read_latent_gaussian(model, (X, Y), rng_key=key, check=False).field == ("b",)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"missing a required argument: 'x'. It is model\(x, y=None\); it was given no arguments"),
        ((X, Y, Y), {}, r"too many positional arguments. .* argument 3 = int64\[6\]"),
        ((X,), {"labels": Y}, r"unexpected keyword argument 'labels'.*labels = int64\[6\]. Options of an .*labels="),
        (
            (Y, X),
            {},
            r"after site 'b' \(line \d+: numpyro.sample.*given x = int64\[6\], y = float64\[6, 2\].*order",
        ),
        ((X.tolist(), Y), {}, r"given x = a list \(jnp.asarray"),
        ((X.astype(">f8"), Y), {}, r"given x = >f8\[6, 2\] \(in the byte order of another machine: .astype\('f8'\)\)"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises(ModelStructureError, match="(?s)" + message) as caught:
        read_latent_gaussian(model, args, kwargs)
    assert caught.value.reason is Reason.EXECUTION and isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("as_given", [np.asarray, jnp.asarray, pd.Series])
@pytest.mark.parametrize("look_up", [lambda u, group: u[group], jnp.take])
def test_groups_that_are_floats_are_told_to_be_integers(look_up: Any, as_given: Any) -> None:
    def groups(group: Any, y: Any) -> None:
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(look_up(u, group), 1.0), obs=y)

    group = as_given(np.array([0.0, 1.0, 2.0, 2.0, 1.0, 0.0]))
    with pytest.raises(ModelStructureError, match=r"must be integers: give group.astype\(int\).*floats where a value"):
        read_latent_gaussian(groups, (group, X[:, 0]))
    assert read_latent_gaussian(groups, (group.astype(int), X[:, 0]), check=False).field == ("u",)


def test_columns_computed_from_a_table_are_not_quoted() -> None:
    def by_name(table: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(b * table["x"])), obs=table["y"])

    with pytest.raises(
        ModelStructureError, match=r"Argument a column of .*write jnp.asarray\(table\['x'\]\)"
    ) as caught:
        read_latent_gaussian(by_name, (pd.DataFrame({"x": X[:, 0], "y": Y}),))
    assert "\n" not in str(caught.value)


def test_tables_of_pandas_are_named() -> None:
    with pytest.raises(ModelStructureError, match=r"x = a DataFrame of pandas \(give the model .to_numpy\(\) of it\)"):
        read_latent_gaussian(model, (pd.DataFrame(X), Y))


def test_the_whole_message_of_a_model_and_its_cause_are_kept() -> None:
    class TooSmall(ValueError):
        pass

    def failing(y: Any) -> None:
        numpyro.sample("f", dist.Normal(0.0, 1.0))
        raise TooSmall("The table is too small.\nIt has 3 rows,\nand 4 are needed.")

    for read in (read_latent_gaussian, read_sparse_linear, read_bilinear):
        with pytest.raises(ModelStructureError, match="(?s)too small.*3 rows,.*4 are needed") as caught:
            read(failing, (Y,))
        assert isinstance(caught.value.__cause__, TooSmall)
    with pytest.raises(ModelStructureError) as caught:
        EP(failing, progress_bar=False).run(KEY, Y)
    assert isinstance(caught.value.__cause__, TooSmall)


def test_errors_of_other_kinds_pass_as_they_are() -> None:
    def failing(y: Any) -> None:
        y["no such column"]

    with pytest.raises(KeyError, match="no such column"):
        EP(failing).run(KEY, {"y": Y})


def test_the_line_of_a_wrapped_model_is_found() -> None:
    for wrapped in (handlers.seed(model, 0), handlers.scale(handlers.seed(model, 0), scale=1.0)):
        with pytest.raises(ModelStructureError, match=r"line \d+: numpyro.sample\(\"y\""):
            read_latent_gaussian(wrapped, (Y, X))


def test_branches_and_numpy_functions_are_found_by_their_line() -> None:
    def branching(y: Any) -> None:
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        f = numpyro.sample("f", dist.Normal(0.0, s))
        if s > 1.0:
            f = 2.0 * f
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match=r"y = float64\[6\].*line \d+: if s > 1.0:.*boolean conversion"):
        read_latent_gaussian(branching, (X[:, 0],))


def test_lengths_that_depend_on_unknowns_are_found_by_their_line() -> None:
    def random_length(y: Any) -> None:
        n = numpyro.sample("n", dist.Poisson(5.0))
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
        total = scan(lambda level, _: (level + f, None), 0.0, None, length=n)[0]
        numpyro.sample("y", dist.Normal(total, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match=r"takes one for a length.*line \d+: total = scan\("):
        read_latent_gaussian(random_length, (X[:, 0],))


@pytest.mark.parametrize(
    "transform",
    [
        lambda step, y: jax.lax.scan(step, 0.0, y),
        lambda step, y: jax.vmap(step)(0.0 * y, y),
        lambda step, y: jax.jit(step)(0.0, y[0]),
    ],
    ids=["scan", "vmap", "jit"],
)
def test_sites_inside_a_function_that_jax_transforms_are_named(transform: Any) -> None:
    def lost(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))

        def step(level: Any, value: Any) -> tuple[Any, Any]:
            level = numpyro.sample("level", dist.Normal(level, scale))
            numpyro.sample("y", dist.Normal(level, 1.0), obs=value)
            return level, level

        transform(step, y)

    with pytest.raises(ModelStructureError, match="site 'level' is inside a function that JAX.*control_flow") as caught:
        read_latent_gaussian(lost, (X[:, 0],))
    assert caught.value.site == "level"


def test_numpy_arrays_that_a_step_indexes_are_found_by_their_line() -> None:
    def indexed(y: Any) -> None:
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
        scan(lambda _, t: (None, numpyro.sample("y", dist.Normal(f, 1.0), obs=y[t])), None, jnp.arange(len(y)))

    with pytest.raises(ModelStructureError, match=r"data as jax arrays.*y = float64\[6\].*line \d+: scan\(lambda"):
        read_latent_gaussian(indexed, (X[:, 0],))


def test_sites_inside_a_branch_are_named() -> None:
    def branched(y: Any) -> None:
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
        level = cond(
            y[0] > 0.0,
            lambda _: numpyro.sample("z", dist.Normal(0.0, 1.0)),
            lambda _: numpyro.sample("z", dist.Normal(1.0, 1.0)),
            None,
        )
        numpyro.sample("y", dist.Normal(f + level, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match="site 'z' is inside a cond.*Sample it outside.*NUTS") as caught:
        read_latent_gaussian(branched, (X[:, 0],))
    assert caught.value.site == "z"


def test_observations_inside_a_scan_are_no_reason_to_refuse() -> None:
    def scanned(y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))

        def step(carry: Any, value: Any) -> tuple[Any, None]:
            numpyro.sample("y", dist.Normal(b, 1.0), obs=value)
            return carry, None

        scan(step, 0.0, y)

    assert read_latent_gaussian(scanned, (X[:, 0],)).field == ("b",)


def test_a_branch_on_data_is_taken_of_numpy_arrays() -> None:
    def by_sign(y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(b if y.mean() > 0 else 2.0 * b, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match=r"as NumPy arrays where it branches on them.*if y.mean\(\) > 0"):
        read_latent_gaussian(by_sign, (jnp.asarray(X[:, 0]),))
    assert read_latent_gaussian(by_sign, (X[:, 0],)).field == ("b",)


def test_a_discrete_site_is_named_where_no_other_is_left() -> None:
    def discrete(y: Any) -> None:
        k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3.0))
        numpyro.sample("y", dist.Normal(1.0 * k, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match=r"discrete sites \['k'\] can be summed out"):
        read_latent_gaussian(discrete, (X[:, 0],))


@pytest.mark.parametrize("error", [AssertionError, IndexError, TypeError, ValueError])
def test_what_fails_on_a_column_runs_with_its_array_whatever_it_raised(error):
    def run(call):
        if isinstance(call.args[0], pd.Series):
            raise error("as it is")
        return call.args[0].sum()

    column = ModelCall(lambda x: None, (pd.Series([1, 2]),), {}, jax.random.key(0))
    call, found = run_or_with_arrays(column, run)
    assert found == 3 and isinstance(call.args[0], np.ndarray)
    assert run_or_with_arrays(call, run)[0] is call
    with pytest.raises(error, match="without arrays"):
        run_or_with_arrays(call, lambda _: (_ for _ in ()).throw(error("without arrays")))


def test_a_list_for_a_parameter_is_named():
    def model(y):
        slopes = numpyro.sample("slopes", dist.Normal(0, [1, 2]))
        numpyro.sample("y", dist.Normal(slopes, 1), obs=y)

    with (
        pytest.warns(DeprecationWarning, match="got <class 'list'>"),
        pytest.raises(ModelStructureError, match=r"site 'slopes': the scale of Normal is a list.*jnp.array\(\[...\]\)"),
    ):
        read_latent_gaussian(model, (np.zeros(2),))
