"""Division of logs of events, and networks by stochastic gradients, of all studies of sequences."""

from __future__ import annotations

from typing import Any

import optax
from numpyro.infer import init_to_mean
from numpyro.infer.autoguide import AutoNormal

from numpyro_ext.datasets.event_logs import EventLog
from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, EventSplit


def divided(log: EventLog) -> EventSplit:
    """Division by the rules of the source's public code, with one nat as the least entropy."""
    sequences = EventSequences.from_events(*log[:3]).filter(min_item=10, min_user=11, min_entropy=1.0)
    return sequences.split(share=0.1, least=3, most=500)


def network(optim: Any = None, *, guide_scale: float | None = None, **options: Any) -> ChunkedSVI:
    """Engine of recurrent networks: RMSprop 0.0075 with bias corrected, 20 users and 64 events a step.

    :param optim: another optimiser.
    :param guide_scale: deviations of the guide of latent personal parts to begin with, at the prior's mean; ``None``
        where no part is latent.
    """
    guide = None
    if guide_scale is not None:
        guide = AutoNormal(collaborative_rnn, init_loc_fn=init_to_mean, init_scale=guide_scale)
    optim = optax.rmsprop(0.0075, decay=0.997, bias_correction=True) if optim is None else optim
    options = {"batch_size": 20, "chunk": 64, **options}
    return ChunkedSVI(collaborative_rnn, guide, optim=optim, plate="users", progress_bar=False, **options)
