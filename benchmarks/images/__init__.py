"""Pictures by the engines and by scikit-image."""
