"""Recipes: images and containers ready to be rented, in groups and with tags."""
