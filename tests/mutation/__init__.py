"""The mutation check: every operator, sign, factor and transpose changed once. `make mutation`."""
