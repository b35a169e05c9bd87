"""What every engine is to its user; knows no form and no algorithm."""
