"""What has been read before."""

import pytest


def forget_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read models as if none had been read before, as under a threshold that is another one now."""
    from numpyro_ext.compilation.recent import Recent
    from numpyro_ext.structure.latent_gaussian import read

    monkeypatch.setattr(read, "_KEPT", Recent(16))
