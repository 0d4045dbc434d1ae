"""Measurements of this package and its peers, side by side in one run. `make bench` runs them all."""
