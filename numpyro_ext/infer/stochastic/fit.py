"""Result of a stochastic fit: parameters, what was lost on the way, and predictions of events."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from ...display import Shown
from ..front.files.archive import write_archive
from ..front.files.content import Content
from .chunks import Events, checked_events, joined
from .labels import Labels, checked_user
from .local_sites import parted
from .personal.people import Given, PersonalPosterior
from .program import Parameters, Program
from .scoring import checked_number
from .setting import Setting


class TrainingState(NamedTuple):
    """All that a run needs to go on to the bit."""

    parameters: Parameters
    best: dict[str, Any] | None
    """Values of parameters, on the real line, that were best on validation."""
    best_epoch: int
    key: Array
    """Key of the next draws."""
    order_key: Array
    """Key of the order of batches."""
    rate: float
    """Factor of all steps: halved by each loss that was not finite."""
    num_failures: int
    epoch: int
    batch: int
    """Batches of this epoch that are done."""
    total: float
    """Loss of these."""
    seen: int
    """Events, or rows, of these."""
    losses: tuple[float, ...]
    errors: tuple[float, ...]
    digest: str = ""
    """Digest of the data."""

    def packed(self) -> dict[str, Any]:
        """State as dictionaries, lists and numbers, for a file."""
        parameters = self.parameters._asdict()
        for name in ("shared_state", "row_states"):
            parameters[name] = jax.tree.leaves(parameters[name])
        return {**self._asdict(), "parameters": parameters}

    @classmethod
    def unpacked(cls, content: Content) -> TrainingState:
        """State from :meth:`packed`; those of the optimiser stay lists until a run gives them their structure."""
        return cls(**{**content, "parameters": Parameters(**content["parameters"])})


class ChunkedFit(Shown):
    """Fitted parameters of :class:`~numpyro_ext.infer.ChunkedSVI`, and the predictions that they make.

    :param program: of the run.
    :param int batch_size: users whose events are scored side by side.
    :param params: values of all ``param`` sites by name; local ones are whole tables.
    :param last_state: for ``run(..., init_state=fit.last_state)``.
    :param str stopped: why the run ended: ``"num_epochs"``, ``"patience"``, ``"interrupted"`` or ``"not finite"``.
    :param notes: what was left out of the data or went wrong.
    :param setting: arguments of the run.
    :param labels: names of items and users, so that other data are known to be numbered alike.
    """

    def __init__(
        self,
        program: Program,
        batch_size: int,
        params: dict[str, Array],
        last_state: TrainingState,
        stopped: str,
        notes: tuple[str, ...],
        setting: Setting,
        labels: Labels | None = None,
    ) -> None:
        self._program, self._batch_size, self._setting = program, batch_size, setting
        self._labels = Labels() if labels is None else labels
        self.params, self.last_state, self.stopped, self.notes = params, last_state, stopped, notes
        self._personal: PersonalPosterior | None = None

    @property
    def losses(self) -> np.ndarray:
        """Loss of each epoch, per event, or per row without ``chunk``, averaged while parameters moved."""
        return np.array(self.last_state.losses)

    @property
    def validation_errors(self) -> np.ndarray:
        """Error on the validation after each epoch: nats per event, mean over users of the mean over their events."""
        return np.array(self.last_state.errors)

    @property
    def best_epoch(self) -> int:
        """Epoch, from one, whose parameters ``params`` has: the best on validation, or the last without one."""
        return self.last_state.best_epoch or self.last_state.epoch

    @property
    def num_items(self) -> int:
        """Number of items that events are of."""
        return int(self._setting.constants.options["num_items"])

    @property
    def is_sequential(self) -> bool:
        """True for models of sequences."""
        return bool(self._program.chunk)

    def _shown(self) -> list[str]:
        state = self.last_state
        unit = "event" if self.is_sequential else "row"
        lines = [f"ChunkedFit: {state.epoch} epochs, ended by {self.stopped}"]
        if state.losses:
            lines.append(f"loss {state.losses[-1]:.4f} nats per {unit} in the last epoch")
        if state.errors:
            lines.append(f"validation {min(state.errors):.4f} nats per event, epoch {self.best_epoch}")
        return [*lines, *self.notes]

    def event_log_probabilities(
        self, sequences: Any, *, num_draws: int | None = None, rng_key: Array | None = None
    ) -> np.ndarray:
        """Log probability of each event given those of its user before it.

        :param sequences: of the users that were fitted, with ``items``, ``starts``, ``lengths``.
        :param num_draws: draws of the guide that probabilities are averaged over; by default 16, or 1 without one.
        :param rng_key: for these.
        :return: shape ``(total,)``, in the order of ``items``.
        :raises ValueError: for other items, or other users where the model has a personal part.
        """
        self._check_data(sequences)
        return self._log_probabilities(checked_events(sequences, self.num_items), num_draws, rng_key)

    def _log_probabilities(self, events: Events, num_draws: int | None, rng_key: Array | None) -> np.ndarray:
        key = jax.random.key(0) if rng_key is None else rng_key
        draws = [
            self._program.event_scores(self.params, k, events, self._batch_size, self._setting)
            for k in jax.random.split(key, self._draws(num_draws))
        ]
        return logsumexp(draws, axis=0) - np.log(len(draws))

    def log_predictive(self, split: Any, *, num_draws: int | None = None, rng_key: Array | None = None) -> np.ndarray:
        """Log probability of each test event of a split given all events of its user before it.

        :param split: with ``train``, ``validation`` and ``test``, such as ``EventSequences.split`` makes.
        :param num_draws: draws of the guide that probabilities are averaged over; by default 16, or 1 without one.
        :param rng_key: for these.
        :return: shape ``(test events,)``, user by user.
        """
        history, whole = self._parts_of(split)
        self._labels.warn_of_seen("ChunkedFit", split)
        scores = self._log_probabilities(whole, num_draws, rng_key)
        return scores[later_than(whole, np.asarray(history.lengths))]

    def states(self, split: Any, *, num_draws: int | None = None, rng_key: Array | None = None) -> np.ndarray:
        """State of the network before each test event of a split: the numbers of the carry.

        A mixture of predictors can take its weights from them: ``PersonalMixture(network=fit, gate=True)``.

        :param split: as of :meth:`log_predictive`.
        :param num_draws: draws of the guide that states are averaged over; by default 16, or 1 without one.
        :param rng_key: for these.
        :return: shape ``(test events, numbers)``, user by user.
        """
        history, whole = self._parts_of(split)
        key = jax.random.key(0) if rng_key is None else rng_key
        keys = jax.random.split(key, self._draws(num_draws))
        first = np.asarray(history.lengths)
        draws = (
            self._program.event_states(self.params, k, whole, first, self._batch_size, self._setting) for k in keys
        )
        return sum(draws, np.zeros(())) / len(keys)

    def next_log_probabilities(
        self, history: ArrayLike, user: int | None = None, *, num_draws: int | None = None, rng_key: Array | None = None
    ) -> np.ndarray:
        """Log probabilities of all items to be next.

        :param history: indices of the items so far, in order; may be empty.
        :param user: index of a user of the fit; may be ``None`` where the model has no personal part.
        :param num_draws: draws of the guide that probabilities are averaged over; by default 16, or 1 without one.
        :param rng_key: for these.
        :return: shape ``(items,)``.
        """
        self._check_sequential()
        items = np.asarray(history, np.int64 if np.size(history) == 0 else None)
        if items.ndim != 1 or items.dtype.kind not in "iu" or (items < 0).any() or (items >= self.num_items).any():
            raise ValueError(
                f"ChunkedFit: a history is a vector of items from 0 to {self.num_items - 1}. The index of a label is "
                "its place in EventSequences.item_labels."
            )
        num_users = self._setting.num_rows
        if user is None and self._program.sites.axes:
            names = ", ".join(map(repr, self._program.sites.axes))
            raise ValueError(f"ChunkedFit: {names} are personal; give user=, the index of someone who was fitted.")
        if user is not None:
            user = checked_user("ChunkedFit", user, num_users)
        width = self._program.chunk or 1
        # to few lengths, as each is a program
        padded = np.zeros(width * 2 ** (len(items) // width).bit_length(), np.int32)
        padded[: len(items)] = items
        key = jax.random.key(0) if rng_key is None else rng_key
        draws = [
            self._program.next_logits(
                *self._program.lent_values(self.params, np.array([user or 0])),
                k,
                jnp.asarray(user or 0),
                jnp.asarray(len(items)),
                padded,
                self._setting,
                width,
            )
            for k in jax.random.split(key, self._draws(num_draws))
        ]
        return logsumexp(np.asarray(draws, float), axis=0) - np.log(len(draws))

    def fold_in(self, history: Any, *, num_starts: int = 1) -> Any:
        """Posterior of someone who was not in the fit, given all that is shared.

        For models with one standard normal latent site in the plate, as ``collaborative_rnn(personal="low-rank")`` has.
        The mode of her latent numbers and the Gauss-Newton curvature there, which is positive by construction, make a
        Gaussian; answers on her posterior weight draws around it by her exact density, so that they are not those of a
        Gaussian.

        :param history: indices of her items so far; may be empty, for the prior. A list of histories, or a matrix with
            one in each row, is folded in side by side. Items that the fit has not seen are left out, which
            ``num_dropped`` tells.
        :param int num_starts: points that searches for modes begin at: the mean of the prior, and others that are
            spread as it is. Personal parts of a network often have several modes, of which one search finds one;
            draws on the posterior are around all that are found.
        :return: a :class:`Person`, with ``next_probabilities``, ``mean`` and ``covariance``, ``mode`` and
            ``log_evidence``; a list of them for a list of histories.
        :raises ValueError: if the model has free parameters of each user, or other latent sites.

        **Cost:** for each start some thirty steps of a pass forwards and back, and two of one for each latent number.
        Lengths are padded to powers of two, and other people of these lengths compile nothing.
        """
        self._check_sequential()
        num_starts = checked_number("ChunkedFit.fold_in", "num_starts", num_starts, 1)
        if getattr(history, "ndim", 0) == 2:
            history = list(np.asarray(history))
        is_many = isinstance(history, list | tuple) and len(history) > 0 and all(np.ndim(one) == 1 for one in history)
        given = [np.asarray(one) for one in (history if is_many else [history])]
        for one in given:
            if one.ndim != 1 or (one.size and one.dtype.kind not in "iu"):
                raise ValueError(
                    "ChunkedFit.fold_in: a history is a vector of indices of items, and many are a list of vectors; "
                    f"got {one.dtype} of the shape {one.shape}. Labels have their index in EventSequences.item_labels."
                )
        known = [one[(one >= 0) & (one < self.num_items)].astype(np.int32) for one in given]
        shared = Given(parted(self.params, self._program.sites.axes)[0], self._setting)
        if self._personal is None:
            self._personal = PersonalPosterior(self._program, shared, "ChunkedFit.fold_in")
        dropped = [a.size - b.size for a, b in zip(given, known, strict=True)]
        people = self._personal.people(shared, known, dropped, num_starts)
        return people if is_many else people[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit and its state to a file, for ``ChunkedSVI.load``.

        :param path: of the file.
        """
        setting = {name: getattr(self._setting, name) for name in ("kwargs", "carry", "num_rows")}
        write_archive(
            path,
            {
                "params": self.params,
                "training": self.last_state.packed(),
                "stopped": self.stopped,
                "notes": self.notes,
                "setting": setting,
                "axes": self._program.sites.axes,
                "labels": self._labels._asdict(),
            },
        )

    def _parts_of(self, split: Any) -> tuple[Events, Events]:
        """Events before the test of a split, and all of them."""
        self._check_data(split)
        parts = [checked_events(getattr(split, name), self.num_items) for name in ("train", "validation", "test")]
        history = joined(parts[0], parts[1])
        return history, joined(history, parts[2])

    def _check_data(self, data: Any) -> None:
        self._check_sequential()
        self._labels.check("ChunkedFit", data, with_users=bool(self._program.sites.axes))

    def _draws(self, number: int | None) -> int:
        if number is None:
            return 16 if self._program.has_guide else 1
        return checked_number("ChunkedFit", "num_draws", number, 1)

    def _check_sequential(self) -> None:
        if not self.is_sequential:
            raise ValueError("ChunkedFit: only models of sequences (chunk=) predict next events.")


def later_than(events: Events, counts: np.ndarray) -> np.ndarray:
    """Mask of the events that have ``counts[user]`` events of their user before them, at least."""
    lengths = np.asarray(events.lengths)
    place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.asarray(place >= np.repeat(counts, lengths))


def mean_error(events: Events, scores: np.ndarray, counts: np.ndarray) -> float:
    """Error in nats per event after the first ``counts`` of each user: mean over users of the mean over events."""
    later, lengths = later_than(events, counts), np.asarray(events.lengths)
    users = np.repeat(np.arange(lengths.size), lengths)[later]
    number = np.bincount(users, minlength=lengths.size)
    sums = np.bincount(users, -scores[later], minlength=lengths.size)
    return float(np.mean(sums[number > 0] / number[number > 0]))
