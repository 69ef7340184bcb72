"""Reservations: time that is paid before it is used."""
