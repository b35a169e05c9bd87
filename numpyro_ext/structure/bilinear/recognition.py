"""Recognition of the factors of an observed site of a bilinear model, and of the predictor that they see."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import Conflict, ModelStructureError
from ..factors.recognise import Recognised, recognise
from ..model.running.inspection import SiteInfo
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees, classify
from ..program.questions import Questions
from .factors import TAKEN, check_factor
from .vectors.layouts import self_product, shared_block


def recognise_cells(
    questions: Questions,
    name: str,
    site: SiteInfo,
    traced: FactorTrace,
    degrees: Degrees,
    field: Mapping[str, int],
    env: Mapping[int, Array],
    takes_any: bool,
) -> Recognised:
    """The factors of an observed site and their predictor, seen from the first site that finds one.

    :param questions: the model and its data.
    :param str name: of the observed site.
    :param SiteInfo site: the site as the model has it.
    :param FactorTrace traced: its arrays.
    :param degrees: of the program in all sites of the field.
    :param field: for each site of the field its input of the program.
    :param env: values of the hyperparameters.
    :param bool takes_any: whether factors need be neither concave nor analytic.
    :raises ModelStructureError: if no predictor is found, or its factors are not taken.
    :raises Conflict: naming sites that other parameters than the predictor depend on.
    """
    program = questions.program
    for part, atom in (("mask", traced.mask), ("scale", traced.scale), ("value", traced.value)):
        if atom is not None and degrees.of(atom) != Degree.CONSTANT:
            raise ModelStructureError(
                f"the {part} of site '{name}' depends on {sorted(degrees.sites_of(atom))}.", site=name
            )
    numbers = set(field.values())
    parameters = [a for a in traced.parameters.values() if isinstance(a, int)]
    beside: set[str] = set()
    probe = dict(env)
    for number in numbers:
        probe[number] = jnp.zeros(program.shape(number), jnp.result_type(float))
    for block, number in field.items():
        alone = classify(program, {block: number})
        degree = alone.of(traced.log_prob)
        if degree == Degree.CONSTANT:
            continue
        found = recognise(questions, alone, traced, probe)
        if found is None:
            if degree == Degree.NONLINEAR and any(self_product(program, alone, a) for a in parameters):
                raise ModelStructureError(shared_block(block))
            continue
        potential = jax.eval_shape(lambda found=found: found.build(probe, jnp.asarray(True)).potential)
        num_rows = len(found.rows) // int(np.prod(program.shape(traced.log_prob)))
        check_factor(name, found.label, potential, num_rows, takes_any)
        if others := program.ancestors(parameters, [found.predictor]) & numbers:
            beside |= {n for n, number in field.items() if number in others}
            continue
        return found
    if beside and beside != set(field):
        # Such are cut points: they are hyperparameters, which some engines integrate over.
        raise Conflict(
            f"other parameters of site '{name}' than its predictor depend on {sorted(beside)}.", frozenset(beside), name
        )
    raise ModelStructureError(
        f"observed site '{name}' ({site.family}) has no predictor that is affine in one of "
        f"{list(field)}, or is of a family that was not recognised: this engine takes {TAKEN}. Use NUTS for "
        "other models.",
        site=name,
    )
