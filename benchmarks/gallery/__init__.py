"""All models of the gallery by every engine and by NUTS."""
