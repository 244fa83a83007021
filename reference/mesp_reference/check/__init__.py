"""How an implementation is compared with the reference: errors, tolerances, the naive rule."""
