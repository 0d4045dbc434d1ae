"""Tests of woq_triton; helpers are imported as `tests.<module>`."""
