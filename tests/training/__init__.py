"""Tests of the training loop and what it is made of."""
