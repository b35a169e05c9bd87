"""The main job: NUTS, SMC, SVI, Laplace and EP on the coal-mining disasters; ``python -m numpyro_ext.demo``."""
