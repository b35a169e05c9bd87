"""Binary and count matrices: sweeps over listed and drawn cells."""
