"""Logs that are numbered in another way than the log of a fit, or that it has seen: refused, numbered alike, told."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.stochastic.fit import ChunkedFit
from numpyro_ext.sequences import (
    Bigram,
    EventSequences,
    HiddenMarkovBaseline,
    MatrixFactorisation,
    OwnBigram,
    OwnFrequencies,
    PersonalMixture,
    RepeatLast,
    Uniform,
    Unigram,
    compare_sequences,
    numbered_as,
)

OLD = {"ann": list("abcabcabca"), "bob": list("abcbcbcabc"), "cem": list("cabcabccab")}
NEW = {"bob": list("bcbabcb"), "ann": list("cbxabcb")}
"""The items a, b and c of before, of which x is none; two people, in another order."""


def frequencies(users, events, mask, carry, *, num_users, num_items, personal=False):
    """Popularity of items, for all or for each person."""
    shared = None if personal else numpyro.param("shared", jnp.zeros(num_items))
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        own = numpyro.param("own", jnp.zeros((num_users, 1, num_items)), event_dim=1) if personal else None
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Categorical(logits=own if personal else shared), obs=events)
    return carry


def network(split, **options):
    engine = ChunkedSVI(frequencies, optim=optax.adam(0.1), plate="users", batch_size=3, chunk=8, progress_bar=False)
    return engine, engine.run(random.key(0), split, num_epochs=5, carry=jnp.zeros(1), **options)


@pytest.fixture(scope="module")
def old():
    return EventSequences.from_lists(OLD).split(share=0.2, least=1, most=3)


def test_events_keep_their_labels_in_other_numbers(old):
    new = EventSequences.from_lists(NEW)
    alike = numbered_as(new, old.train)
    assert [old.train.item_labels[alike[user]].tolist() for user in range(2)] == [list("bcbabcb"), list("cbabcb")]
    assert alike.user_labels.tolist() == ["bob", "ann"]
    people = numbered_as(new, old.train, users=True)
    assert people.user_labels.tolist() == ["ann", "bob", "cem"]
    assert ["".join(old.train.item_labels[people[user]]) for user in range(3)] == ["cbabcb", "bcbabcb", ""]
    assert people.notes == ("items that the other log does not have: 1 events",)
    with pytest.raises(ValueError, match=r"nothing in common: items begin with \['p', 'q'\] and \['a', 'b', 'c'\]"):
        numbered_as(EventSequences.from_lists({"ann": ["p", "q"]}), old.train)
    with pytest.raises(ValueError, match=r"and users begin with \['dan'\] and \['ann', 'bob', 'cem'\]"):
        numbered_as(EventSequences.from_lists({"dan": ["a", "b"]}), old.train, users=True)


def test_other_items_are_refused_by_all_that_predicts(old):
    other = EventSequences.from_lists({who: [item + item for item in own] for who, own in OLD.items()})
    other = other.split(share=0.2, least=1, most=3)
    fits = [predictor.fit(old.train, old.validation) for predictor in (Unigram(), Bigram(), PersonalMixture())]
    for fitted in (*fits, network(old)[1]):
        fitted.log_predictive(old)
        with pytest.raises(ValueError, match=r"other items than these: number 0 was 'a' and is 'aa'.*numbered_as"):
            fitted.log_predictive(other)
    with pytest.raises(ValueError, match="number 0 was 'a' and is 'aa'"):
        compare_sequences(fits, other)


def test_events_that_were_learned_from_are_no_test(old, tmp_path):
    log = EventSequences.from_lists(OLD)
    later = EventSequences.from_lists({"ann": OLD["ann"], "bob": list("cccccccccc"), "cem": list("cab")})
    engine, fit = network(log)
    fit.save(tmp_path / "fit")
    fits = [fit, engine.load(tmp_path / "fit")]
    fits += [predictor.fit(log) for predictor in (Bigram(), MatrixFactorisation(2, 1.0), RepeatLast())]
    for fitted in fits:
        with pytest.warns(UserWarning, match="was fitted to 6 of these test events, of 3 users, so that its error is"):
            fitted.log_predictive(old)
        # other events of bob, and of cem no test that was in the training
        split = later.split(share=0.2, least=1, most=3)
        with pytest.warns(UserWarning, match="was fitted to 2 of these test events, of 1 users"):
            fitted.log_predictive(split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for predictor in (Uniform(), OwnFrequencies(), OwnBigram()):  # which learn from no event of others
            predictor.fit(log).log_predictive(old)
        network(old.history)[1].log_predictive(old)
        Bigram().fit(old.history).log_predictive(old)
    # weights of a mixture are learned from events that its network must not know
    with pytest.warns(UserWarning, match="ChunkedFit was fitted to 6 of these test events"):
        PersonalMixture(network=network(old.history)[1]).fit(old.train, old.validation)


def test_other_users_are_refused_where_they_have_a_part_of_their_own(old, tmp_path):
    new = EventSequences.from_lists(NEW | {"eve": list("abcabc")}).split(share=0.2, least=1, most=3)
    others, people = numbered_as(new, old.train), numbered_as(new, old.train, users=True)
    for predictor in (MatrixFactorisation(2, 1.0), OwnFrequencies(causal=False), HiddenMarkovBaseline(2, personal=1.0)):
        predictor.fit(old.train, old.validation)
        with pytest.raises(ValueError, match=r"other users than these: number 0 was 'ann' and is 'bob'.*users=True"):
            predictor.log_predictive(others)
        assert np.isfinite(predictor.log_predictive(people)).all()
    engine, personal = network(old, personal=True)
    personal.save(tmp_path / "fit")
    for fit in (personal, engine.load(tmp_path / "fit")):
        assert isinstance(fit, ChunkedFit)
        with pytest.raises(ValueError, match=r"other users than these: number 0 was 'ann' and is 'bob'.*users=True"):
            fit.event_log_probabilities(others.test)
    found = personal.event_log_probabilities(people.train)
    logs = jax.nn.log_softmax(personal.params["own"][:, 0])
    np.testing.assert_allclose(found, logs[people.train.users, people.train.items], rtol=1e-6)
    # a pooled one takes anybody
    assert np.isfinite(network(old)[1].log_predictive(others)).all()
