"""Charges that services make for what people and teams used of them."""
